"""Make digits/*.gz from scikit-learn's copy of the UCI handwritten digits. Needs scikit-learn, nothing else here does.

    python -m train.samples.make_digits [folder]      (default: digits/ beside this file)

The same values come out each time. Pixels count 0..16 in the source; they are stored times 15, as 0..240. The split is
stratified: of each class every fifth image in the order of the source goes to the test set.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits  # type: ignore[import-not-found,import-untyped,unused-ignore]

from train.data.sources.mnist_family import write_idx

SCALE = 15


def main(folder: Path) -> None:
    source = load_digits()
    images = torch.from_numpy(source.images).to(torch.uint8) * SCALE
    labels = torch.from_numpy(source.target).to(torch.uint8)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        test[(labels == digit).nonzero().flatten()[2::5]] = True
    folder.mkdir(exist_ok=True)
    for name, chosen in (("train", ~test), ("t10k", test)):
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images[chosen])
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", labels[chosen])
        print(f"{name}: {int(chosen.sum())} images")
    seen = images[~test].double() / 255
    print(f"training images / 255: mean {seen.mean():.4f}, standard deviation {seen.std():.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "digits")
