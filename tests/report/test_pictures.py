"""Pictures as a reader needs them: colours, axes, units, legends, and what bands, stars and n mean."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from cwfed.core.events import Portrait
from cwfed.report import audit, figures, groups, heatmaps, many, page_data, style, tables
from cwfed.report.finished import read_run
from cwfed.report.groups import Group, Method
from cwfed.runs import session
from tests.conftest import small

RUNS = {
    "fedavg": ["algorithm.name=fedavg"],
    "cwfedavg": ["algorithm.name=cwfedavg"],
    "cwfedavg:wdr=0": ["algorithm.name=cwfedavg", "algorithm.wdr=0"],
    "ditto": ["algorithm.name=ditto"],
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    found = {}
    for label, settings in RUNS.items():
        for seed in (0, 1):
            path = folder / label.replace(":", "-") / str(seed)
            session.run(small("train.rounds=2", f"run.seed={seed}", *settings), path)
            found[label, seed] = read_run(path)
    return found


def group_of(records, labels=tuple(RUNS), seeds=(0, 1)) -> Group:
    return Group("digits", [Method(label, [records[label, seed] for seed in seeds]) for label in labels])


@pytest.fixture
def group(records) -> Group:
    return group_of(records)


@pytest.fixture(scope="module")
def pictures(records):
    """All of them, laid out."""
    return {name: drawn(figure) for name, figure in figures.everything(group_of(records)).items()}


def drawn(figure):
    FigureCanvasAgg(figure).draw()
    return figure


def colours_of(figure) -> dict[str, str]:
    """By the name in a legend, without phase and numbers, the colour of its line."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    pairs = [pair for found in legends for pair in zip(found.get_texts(), found.legend_handles, strict=True)]
    names = {
        text.get_text().replace("\n", " "): to_hex(line.get_color())
        for text, line in pairs
        if hasattr(line, "get_color")
    }
    return {
        label: colour
        for label in RUNS
        for name, colour in names.items()
        if name.split(", ")[0].split(": ")[0] == label
    }


# --- one colour a method


def test_a_method_has_one_colour_in_every_picture_and_on_the_page(group, pictures):
    wanted = {m.label: look.colour.lower() for m, look in zip(group.methods, group.looks, strict=True)}
    assert wanted == {"fedavg": "#0072b2", "cwfedavg": "#d55e00", "cwfedavg:wdr=0": "#d55e00", "ditto": "#cc79a7"}
    with_legends = ["overview", "accuracy-rounds", "accuracy-bytes", "accuracy-seconds", "balanced-accuracy", "macro-f1",
                    "training-loss", "test-loss-received", "test-loss-trained", "correlation", "distance", "clients"]  # fmt: skip
    for name in with_legends:
        assert colours_of(pictures[name]) == wanted, name
    on_page = page_data.page_data([group])["groups"][0]["methods"]
    assert {method["label"]: method["look"]["colour"].lower() for method in on_page} == wanted
    dots = [axes.lines[1].get_color().lower() for axes in pictures["distributions"].axes if axes.get_visible()]
    assert dots == list(wanted.values())


def test_looks_do_not_depend_on_order_labels_or_what_else_is_shown(group, records):
    by_label = {m.label: look for m, look in zip(group.methods, group.looks, strict=True)}
    backwards = group_of(records, tuple(RUNS)[::-1])
    assert {m.label: look for m, look in zip(backwards.methods, backwards.looks, strict=True)} == by_label
    told = groups.methods(list(records.values()))  # as cwfed report calls them, not as cwfed compare does
    assert sorted(method.label for method in told) == ["cwfedavg (wdr=0)", "cwfedavg (wdr=5)", "ditto", "fedavg"]
    looks = {method.label: look for method, look in zip(told, Group("", told).looks, strict=True)}
    assert looks["cwfedavg (wdr=5)"] == by_label["cwfedavg"]
    assert looks["cwfedavg (wdr=0)"] == by_label["cwfedavg:wdr=0"] != by_label["cwfedavg"]
    assert group_of(records, ("ditto",)).looks == [by_label["ditto"]]


def test_a_privacy_picture_has_a_colour_a_method_and_a_stroke_an_estimate(records):
    figure = drawn(audit.picture(list(records.values())))
    lines = figure.axes[0].lines
    assert {to_hex(line.get_color()) for line in lines[:-1]} == {"#0072b2", "#d55e00", "#cc79a7"}
    assert len(lines) == 4 * 3 + 1  # methods and estimates, and 1/K; seeds are one line with a band
    assert len({line.get_linestyle() for line in lines[:3]}) == 3
    assert len(figure.axes[0].collections) == 4 * 3
    assert "n = 2 seeds" in words_below(figure)


# --- phases, bands, stars, n


def words_below(figure) -> str:
    return " ".join(figure._supxlabel.get_text().split())


def test_a_curve_that_mixes_phases_says_so_at_each_line(group):
    assert group.labels("accuracy") == [
        "fedavg, received",
        "cwfedavg, received",
        "cwfedavg:wdr=0, received",
        "ditto, trained",
    ]
    assert group.labels("macro_f1") == group.labels("accuracy")
    for plain in ("received", "trained", "trained loss", "training loss", "correlation", "distance"):
        assert group.labels(plain) == list(RUNS)
    figure = figures.curves(group)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == group.labels()
    assert "received: as received, trained: after local training" in words_below(figure)
    assert page_data.page_data([group])["groups"][0]["labels"]["accuracy"] == group.labels()


def test_one_phase_for_all_stands_at_the_axis(records):
    group = group_of(records, ("fedavg", "cwfedavg"))
    assert group.labels() == ["fedavg", "cwfedavg"]
    assert figures.curves(group).axes[0].get_ylabel() == "test accuracy, % (as received)"
    assert figures.curves(group, "training loss").axes[0].get_ylabel() == "training loss"


def test_bands_stars_and_n_are_explained_in_pictures(group):
    sentence = "Mean over n = 2 seeds, each with a split of its own; band: ± sample standard deviation."
    assert sentence in words_below(figures.curves(group))
    overview = figures.overview(group)
    assert sentence in words_below(overview)
    assert "* the phase on which the method is reported" in words_below(overview)
    assert page_data.page_data([group])["groups"][0]["notes"]["spread"] == sentence


def test_bands_stars_and_n_are_explained_in_tex_and_csv(group, records):
    rows = [method.row for method in group.methods]
    tex = tables.latex(rows)
    assert r"n = 2 seeds, each with a split of its own; $\pm$ sample standard deviation" in tex
    assert "* marks the phase" in tex.split(r"\bottomrule")[1].split(r"\end{tabular}")[0], (
        "in the table, not in a comment"
    )
    found = list(csv.DictReader(io.StringIO(tables.csv(rows))))
    assert [row["n"] for row in found] == ["2"] * 4
    assert all("sample standard deviation" in row["meaning"] and "mark with *" in row["meaning"] for row in found)
    assert "n = 2 seeds" in tables.markdown(rows)
    alone = [method.row for method in group_of(records, seeds=(0,)).methods]
    assert "standard deviation" not in tables.latex(alone)


def test_different_numbers_of_seeds_are_told():
    rows = [{"label": "a", "n": 3, "one_split": True}, {"label": "b", "n": 1, "one_split": True}]
    assert (
        tables.averaged(rows) == "Mean over n = 3 training seeds on one split (b n = 1); ± sample standard deviation."
    )
    assert tables.averaged(rows[1:]) == ""


def test_the_distance_stands_beside_the_correlation(group, pictures):
    row = group.methods[0].row
    last = [record.rounds[-1].distance for record in group.methods[0].records]
    assert row["distance"]["mean"] == pytest.approx(sum(last) / 2)
    head, cells = tables.header([row]), tables.cells(row, tables.metrics_of([row]))
    at = head.index("p~ corr.")
    assert head[at + 1] == "p~ dist."
    assert cells[at + 1] == f"{sum(last) / 2:.3f}"
    assert float(next(csv.DictReader(io.StringIO(tables.csv([row]))))["distance"]) == pytest.approx(sum(last) / 2)
    first = group.records[0].rounds[-1]
    title = pictures["distributions"].axes[0].get_title()
    assert title == f"fedavg\ncorrelation {first.correlation:.2f}, ||p - p~|| {first.distance:.3f}"


def test_the_dots_are_what_the_words_beside_them_are_about(group):
    """Ditto's personal models are never sent: p~ is read from what is."""
    for method, record in zip(group.methods, group.records, strict=True):
        p, estimate = figures.read_distributions(record)
        last = record.rounds[-1]
        assert np.corrcoef(p, estimate)[0, 1] == pytest.approx(last.correlation, abs=1e-3), method.label
        apart = np.linalg.norm((p - estimate).reshape(len(last.participants), -1), axis=1)
        assert apart.mean() == pytest.approx(last.distance, abs=1e-3), method.label


# --- axes, units, legends


def test_rounds_are_whole_numbers(pictures):
    for name, figure in pictures.items():
        for axes in figure.axes:
            if axes.get_xlabel() in ("round", "client", "clients, worst to best under each method"):
                assert all(float(tick).is_integer() for tick in axes.get_xticks()), name


def test_bytes_have_a_unit_with_their_prefix(pictures):
    axes = pictures["accuracy-bytes"].axes[0]
    assert axes.get_xlabel() == "data sent"
    texts = [text.get_text() for text in axes.get_xticklabels() if text.get_text()]
    assert any(text.endswith(("kB", "MB")) for text in texts), texts
    assert not any(text.endswith(("k", "M", "G")) for text in texts)


def cover(one, other) -> bool:
    """Whether two boxes share more than a line of pixels."""
    wide, high = (min(one.max[i], other.max[i]) - max(one.min[i], other.min[i]) for i in (0, 1))
    return wide > 1 and high > 1


def test_a_legend_covers_no_axes(pictures):
    for name, figure in pictures.items():
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
        for legend in legends:
            box = legend.get_window_extent()
            for axes in figure.axes:
                if axes.get_visible():
                    assert not cover(box, axes.get_window_extent()), name
            width, height = figure.get_size_inches() * figure.dpi
            assert box.x0 >= -1, name
            assert box.y0 >= -1, name
            assert box.x1 <= width + 1, name
            assert box.y1 <= height + 1, name


def test_heat_maps_have_units_class_names_and_one_scale_a_row_from_zero(group):
    data = group.records[0].manifest["data"] | {"classes": list("abcdefghij")}
    plain, ours = (replace(record, manifest=record.manifest | {"data": data}) for record in group.records[:2])
    panels = heatmaps.norms("cwfedavg", ours)
    assert [panel.title.split("\n")[1] for panel in panels] == [
        "received",
        "trained",
        "class models",
        "trained - received",
    ]
    figure = drawn(heatmaps.heat_maps([panels, heatmaps.norms("fedavg", plain)]))
    maps = [axes for axes in figure.axes if axes.images and axes.get_xlabel()]
    clims = [axes.images[0].get_clim() for axes in maps]
    assert clims[0] == clims[1] == clims[2] == (0.0, max(np.nanmax(panel.values) for panel in panels[:3]))
    assert clims[3][0] == -clims[3][1]
    bars = [axes.get_ylabel() for axes in figure.axes if not axes.get_xlabel() and axes.get_visible()]
    assert bars == ["norm of the output row", "change of the norm"] * 2
    assert [text.get_text() for text in maps[0].get_xticklabels()] == list("abcdefghij")
    assert [text.get_text() for text in maps[2].get_yticklabels()] == list("abcdefghij")
    (mixed,) = heatmaps.mixture("cwfedavg", ours)
    assert mixed.unit == "share"
    holdings = drawn(heatmaps.distribution(plain.histogram, "x", plain.class_names))
    assert holdings.axes[0].images[0].get_clim()[0] == 0.0
    assert holdings.axes[1].get_ylabel() == "samples"


# --- many clients


def many_clients(record, count=1000):
    """The same run as if it had so many clients: client i has class i % 10 and an accuracy of i / count."""
    rng = np.random.default_rng(0)
    histogram = rng.integers(1, 4, size=(count, 10)) + 90 * np.eye(10, dtype=int)[np.arange(count) % 10]
    p = histogram / histogram.sum(1, keepdims=True)
    manifest = record.manifest | {"split": record.manifest["split"] | {"histogram": histogram.tolist()}}
    accuracies = {str(client): client / count for client in range(count)}
    summary = replace(record.summary, per_client=replace(record.summary.per_client, accuracies=accuracies))
    portrait = Portrait(
        list(range(200)), p[:200].tolist(), p[:200].tolist(), p[:200].tolist(), np.eye(200).tolist(), None
    )
    last = replace(record.rounds[-1], portrait=portrait, participants=list(range(200)))
    started = replace(record.started, clients=count, evaluated=list(range(count)), test_samples=[1] * count)
    return replace(record, manifest=manifest, summary=summary, rounds=[*record.rounds[:-1], last], started=started)


def test_a_thousand_clients_are_sorted_sampled_and_said_so(records):
    methods = [Method(label, [many_clients(records[label, 0])]) for label in ("fedavg", "cwfedavg")]
    group = Group("many", methods)
    data = page_data.page_data([group])["groups"][0]
    assert data["many"]
    assert ", 1,000 clients, " in groups.describe(group.records[0])
    assert data["histogram"]["said"] == "60 of 1,000 clients, sorted by their main class"
    main = [int(np.argmax(row)) for row in data["histogram"]["values"]]
    assert main == sorted(main)
    assert len(main) == 60
    assert set(main) == set(range(10)), "every class has its clients"
    shown = data["methods"][0]["clients"]
    assert (shown["at"][0], shown["at"][-1], shown["of"]) == (1, 1000, 1000)
    assert shown["values"] == sorted(shown["values"])
    assert len(shown["values"]) == many.POINTS
    portrait = data["methods"][0]["portrait"]
    assert portrait["said"] == "60 of 1,000 clients, sorted by their main class"
    assert portrait["clients"] == portrait["whose"]
    assert np.array_equal(portrait["mixture"], np.eye(60))
    assert portrait["dots"]["said"].endswith("||p - p~|| " + f"{group.records[0].rounds[-1].distance:.3f}")
    for name, figure in figures.everything(group).items():
        assert all(
            image.get_array().shape[0] <= 60 for axes in figure.axes for image in axes.images if axes.get_xlabel()
        ), name
    assert "60 of 1,000 clients" in words_below(figures.overview(group))


def test_a_few_clients_are_all_shown_by_number(group):
    data = page_data.page_data([group])["groups"][0]
    clients = sorted(group.records[0].client_accuracies())
    assert not data["many"]
    assert data["methods"][0]["clients"]["at"] == clients
    assert data["histogram"]["said"] == ""
    assert data["histogram"]["clients"] == list(range(len(group.records[0].histogram)))
    assert many.rows_in_words(5) == ""
    assert many.rows_in_words(20, of=1000) == "20 of 1,000 clients"


def test_parts_of_a_bar_have_no_methods_colour(pictures):
    assert not set(style.PARTS) & set(style.COLOURS)
    axes = pictures["cost"].axes[0]
    assert {to_hex(bar.get_facecolor()) for bar in axes.patches} <= {part.lower() for part in style.PARTS}


def test_one_client_with_the_rest_of_the_data_does_not_make_all_others_pale():
    """99 clients hold 3 + 3 samples, the last one holds 970: on a scale to 970 the others would be 0.3 % of a colour."""
    histogram = np.full((100, 2), 3)
    histogram[99] = 0, 970
    panel = heatmaps.holdings(histogram, "who holds what")
    assert heatmaps.scale_of([panel]) == (0.0, 3.0)
    assert "colours end at 3 samples, the largest cell has 970" in panel.said
    figure = heatmaps.distribution(histogram, "who holds what")
    assert figure.axes[1]._colorbar.extend == "max"
    even = heatmaps.holdings(np.array([[10, 3], [4, 7]]), "")
    assert (heatmaps.scale_of([even]), even.said) == ((0.0, 10.0), "")
