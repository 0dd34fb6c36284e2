# cwfed and all that its simulator needs:
#   docker build -t cwfed --build-arg PIP_EXTRA_INDEX_URL=... .     (PyTorch's index of CPU builds: a plain torch brings gigabytes of CUDA libraries)
#   docker run --rm -v "$PWD/runs:/home/cwfed/runs" cwfed run --out runs/first
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL=""

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt . \
 && useradd --create-home --uid 1000 cwfed \
 && mkdir -p /home/cwfed/runs \
 && chown cwfed /home/cwfed/runs

USER cwfed
WORKDIR /home/cwfed
VOLUME ["/home/cwfed/runs"]
ENTRYPOINT ["cwfed"]
CMD ["--help"]
