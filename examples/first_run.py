"""A first run: cwFedAvg on the embedded digits, then the personal model of one client."""

import cwfed


def main() -> None:
    config = cwfed.load_config(settings=["train.rounds=20", "train.lr=0.05"])
    summary = cwfed.run(config, out="runs/first", resume=True)
    print(f"test accuracy of the clients' personal models: {summary.reported.accuracy:.1%}")

    model = cwfed.load_model("runs/first", client=3)  # client 3 holds the digits 0 and 1
    data = cwfed.load_data("digits")
    mine = data.labels <= 1
    print(f"client 3 on zeros and ones: {(model.predict(data.inputs[mine]) == data.labels[mine]).mean():.1%}")


if __name__ == "__main__":
    main()
