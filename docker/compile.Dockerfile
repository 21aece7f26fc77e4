# The image with what `--compile` also needs: a C++ compiler and Python's headers.
# Run: TARGET=compile make image      (it builds rankup:runtime first)
# Edit: nothing.
FROM rankup:runtime
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update -q \
 && apt-get install -q -y --no-install-recommends g++ python3-dev \
 && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/debconf/* /var/log/apt /var/log/dpkg.log
USER 1000:1000
