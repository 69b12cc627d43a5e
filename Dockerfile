# One image for scheduler and worker. It holds the registry's default build of torch, which carries CUDA
# and is large; for a smaller one without, build with --build-arg TORCH_INDEX=<PyTorch's index of CPU builds>.
FROM python:3.11.13-slim-bookworm AS build

ARG TORCH_INDEX=

RUN python -m venv /opt/stepwire
WORKDIR /src
# Before the code, so that a change of it installs nothing again.
COPY requirements/ requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/stepwire/bin/pip install --no-deps --require-hashes -r requirements/runtime.txt \
    && /opt/stepwire/bin/pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r requirements/torch.txt
COPY pyproject.toml README.md LICENSE ./
COPY loader/ loader/
COPY scheduler_service/ scheduler_service/
COPY worker_service/ worker_service/
COPY stepwire/ stepwire/
RUN /opt/stepwire/bin/pip install --no-deps --no-build-isolation . \
    && /opt/stepwire/bin/pip check
# The compiled kernels, for several levels of CPUs: where the image will run is not known here.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ \
    && /opt/stepwire/bin/python -m worker_service.kernels.build --levels /opt/stepwire/kernels


FROM python:3.11.13-slim-bookworm

RUN useradd --uid 10001 --create-home stepwire
COPY --from=build /opt/stepwire /opt/stepwire
ENV PATH=/opt/stepwire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    STEPWIRE_KERNELS=/opt/stepwire/kernels
USER stepwire
WORKDIR /home/stepwire
# Both drain on SIGTERM.
STOPSIGNAL SIGTERM
ENTRYPOINT ["stepwire"]
CMD ["--help"]
