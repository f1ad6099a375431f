# radixserve serving over HTTP, on a CPU:
#
#     docker build -t radixserve .
#     docker run --rm -p 127.0.0.1:8000:8000 -v radixserve:/data radixserve \
#         serve demo --host 0.0.0.0 --allow-unauthenticated-network-access
#
# Inside of a container the server must listen at 0.0.0.0; -p decides who reaches it. /data keeps the
# compiled CPU kernels and downloaded models. With keys and a model of yours: docs/serving.md.
#
# The image has not been built where this file is tested: the tests build the wheel from the files
# that are copied here, and install it.
#
# With CUDA (the package has run on one card, an H200: docs/gpu.md; this image is untested), an image with nvcc:
#     docker build --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg EXTRAS=serve,gguf,cuda \
#         --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t radixserve:cuda .
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG EXTRAS=serve,gguf
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# g++ compiles the CPU kernels for the processor that the container runs on, at the first start.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/radixserve
ENV PATH=/opt/radixserve/bin:$PATH
RUN pip install --no-cache-dir "torch>=2.9,<2.14" --index-url ${TORCH_INDEX}

COPY setup.cfg pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md /src/
COPY tools/editable_backend.py /src/tools/
COPY radixserve /src/radixserve
COPY kernels /src/kernels
RUN pip install --no-cache-dir "/src[${EXTRAS}]" && rm -r /src

RUN useradd --create-home --uid 1000 radixserve && mkdir /data && chown radixserve /data
USER radixserve
ENV HOME=/data RADIXSERVE_CACHE=/data/kernels HF_HOME=/data/huggingface
VOLUME /data
EXPOSE 8000

# Of `serve` at port 8000: healthy while it takes requests and computes, starting while it loads the model.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m --start-interval=5s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health/ready')"]

ENTRYPOINT ["/opt/radixserve/bin/radixserve"]
CMD ["--help"]
