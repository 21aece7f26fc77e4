# The image with Horovod for CPUs. A separate stage builds the wheel, unless docker/horovod has a matching one.
# Run: TARGET=horovod make image      (it builds rankup:runtime first)
# Edit: nothing. horovod.sh sets the version.
FROM rankup:runtime AS wheel
# hadolint ignore=DL3002
USER 0:0
RUN --mount=type=bind,source=docker,target=/opt/rankup/docker \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca \
    if ls /opt/rankup/docker/horovod/*.tar.gz > /dev/null 2>&1; then \
      export PIP_NO_INDEX=1 PIP_FIND_LINKS=/opt/rankup/docker/horovod; \
    fi \
 && if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
 && mkdir /opt/horovod && { cp -r /opt/rankup/docker/horovod/horovod-*/ /opt/horovod 2> /dev/null || true; } \
 && INSTALL=1 RANKUP_CACHE=/opt/horovod bash /opt/rankup/docker/horovod.sh "$(command -v python)"

FROM rankup:runtime
USER 0:0
RUN --mount=type=bind,source=docker,target=/opt/rankup/docker \
    --mount=type=bind,from=wheel,source=/opt/horovod,target=/opt/horovod,rw \
    RANKUP_CACHE=/opt/horovod bash /opt/rankup/docker/horovod.sh "$(command -v python)"
USER 1000:1000
