# Fuelrail on CPUs: sharding, checks, annotation, measurements. For training, install Fuelrail into your own CUDA image.
#   docker build -t fuelrail .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/data" fuelrail shard nuscenes:drive dataset
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --no-install-recommends --yes gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /wheels .

FROM python:3.12-slim
# What --jpeg restart calls.
RUN apt-get update && apt-get install --no-install-recommends --yes libjpeg-turbo-progs && rm -rf /var/lib/apt/lists/*
# torch without CUDA is 2 GB smaller.
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
RUN --mount=from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/fuelrail-*.whl)[bench,view,s3,gcs,az,http,ray,waymo]"
RUN useradd --create-home --uid 1000 fuelrail
# By number: Kubernetes' runAsNonRoot does not look names up.
USER 1000
WORKDIR /data
ENTRYPOINT ["fuelrail"]
CMD ["--help"]
