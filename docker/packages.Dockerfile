# The base of our image, with the packages of requirements.lock and of EXTRAS. docker/Dockerfile finds them installed.
# Run: nothing. image.sh builds it, because pip may need wheels, certificates or an index for torch, which a plain build has not.
# Edit: nothing. Set the ARGs in .env, and the versions in requirements.lock.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The packages have a layer of their own, because only new lock files change them. Wheels are mounted, and no layer has
# the secrets (pip: a private index; ca: its certificates). TORCH_INDEX: if empty, pip's own index, with torch for CUDA
ARG TORCH_INDEX=""
RUN --mount=type=bind,source=docker/requirements.lock,target=/opt/requirements.lock \
    --mount=type=bind,source=docker/host/locked.sh,target=/opt/locked.sh \
    --mount=type=bind,source=docker/wheels,target=/tmp/wheels \
    --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca \
    if ls /tmp/wheels/*.whl > /dev/null 2>&1; then export PIP_NO_INDEX=1 PIP_FIND_LINKS=/tmp/wheels; fi \
 && if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
 && . /opt/locked.sh && locked /opt/requirements.lock python -m pip --quiet install

# EXTRAS="s3 hf" adds run directories on S3 and Hugging Face data sets, in its own layer: the large one stays unchanged
ARG EXTRAS=""
# hadolint ignore=SC2046,SC2086
RUN --mount=type=bind,source=docker,target=/opt/docker \
    --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca \
    if [ -n "$EXTRAS" ]; then \
      export PIP_FIND_LINKS=/opt/docker/extra-wheels \
      && if ls /opt/docker/extra-wheels/*.whl > /dev/null 2>&1; then export PIP_NO_INDEX=1; fi \
      && if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
      && python -m pip --quiet install --no-deps --require-hashes \
           $(printf -- '--requirement /opt/docker/requirements-%s.lock ' $EXTRAS); \
    fi
