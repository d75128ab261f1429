"""Pictures of several sizes, as a dataset of each client gives them; a transform makes them alike."""

import numpy as np
from PIL import Image

import coterie


class Photos:
    """A map-style dataset of (picture, class)."""

    def __init__(self, client: int) -> None:
        self.stream = np.random.default_rng(client)
        self.items = [self.draw() for _ in range(40)]

    def draw(self):
        kind, (width, height) = int(self.stream.integers(2)), self.stream.integers(20, 60, 2)
        gray = np.linspace(0, 255, width)[None] if kind else np.linspace(0, 255, height)[:, None]
        return Image.fromarray(np.broadcast_to(gray, (height, width)).astype(np.uint8)), kind

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int):
        return self.items[place]


photos = [Photos(client) for client in range(4)]

# Coterie
federation = coterie.from_datasets(photos, transform=lambda picture: picture.resize((16, 16)))
settings = coterie.Settings(rounds=5)
run = coterie.simulate(federation, coterie.METHODS["random"](num_peers=2), model="cnn-b", settings=settings)
print(run)
