# packlora on a machine with NVIDIA GPUs:
#   docker build -t packlora .
#   docker run --gpus all -v "$PWD:/work" packlora train run.yaml
FROM python:3.12-slim
# Triton compiles its launcher with a C compiler
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /packlora
COPY pyproject.toml setup.py README.md LICENSE ./
COPY packlora packlora
COPY examples examples
RUN pip install --no-cache-dir ".[gguf,parquet,quant,liger]"
WORKDIR /work
ENTRYPOINT ["packlora"]
