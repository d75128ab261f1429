import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from coterie.data.transforms import add_noise, blur_images, rotate_images


def images(*shape: int) -> torch.Tensor:
    return torch.from_numpy(
        np.random.Generator(np.random.Philox(0)).integers(0, 256, shape, dtype=np.uint8)
    )


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, -1])
def test_quarter_turns_are_those_of_numpy(turns):
    """Counter-clockwise and exact, for any number of channels."""
    x = images(3, 2, 7, 7)
    expected = np.rot90(x.numpy(), turns, axes=(2, 3))
    np.testing.assert_array_equal(rotate_images(x, 90.0 * turns).numpy(), expected)


def test_the_general_formula_agrees_with_a_quarter_turn():
    """An angle a hair off 90 degrees takes the same nearest pixels as the exact turn."""
    x = images(2, 1, 9, 9)
    np.testing.assert_array_equal(rotate_images(x, 90 + 1e-9).numpy(), rotate_images(x, 90).numpy())


def test_a_small_turn_moves_pixels_counter_clockwise_and_fills_corners_with_mid_gray():
    """By 45 degrees, the pixel to the right of the center of a 5x5 image comes to the upper right."""
    x = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    x[0, 0, 2, 3] = 200
    turned = rotate_images(x, 45)[0, 0]
    # what is here came from 1.41 to the right of the center, whose nearest pixel is (2, 3)
    assert turned[1, 3] == 200
    assert turned[3, 3] == 0
    assert turned[0, 0] == 128
    assert rotate_images(x, 45, fill=7)[0, 0, 0, 0] == 7


def test_turning_float_images_fills_with_zero():
    assert rotate_images(torch.ones(1, 1, 5, 5), 45)[0, 0, 0, 0] == 0.0


def test_opposite_small_turns_mirror_each_other():
    """Turning the mirrored image one way is mirroring the image turned the other way."""
    x = images(2, 3, 28, 28)
    np.testing.assert_array_equal(
        rotate_images(x.flip(-1), 10).numpy(), rotate_images(x, -10).flip(-1).numpy()
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_blur_is_pillows(channels):
    x = images(2, channels, 8, 8)
    one = Image.fromarray(x[1].movedim(0, -1).squeeze(-1).numpy()).filter(
        ImageFilter.GaussianBlur(2)
    )
    expected = np.asarray(one).reshape(8, 8, channels)
    np.testing.assert_array_equal(blur_images(x, 2.0)[1].movedim(0, -1).numpy(), expected)


def test_blur_of_no_images_and_of_radius_zero_change_nothing():
    assert blur_images(images(0, 3, 8, 8), 2.0).shape == (0, 3, 8, 8)
    x = images(2, 3, 8, 8)
    assert torch.equal(blur_images(x, 0.0), x)


def test_noise_has_the_asked_deviation_and_comes_from_the_stream():
    x = torch.zeros(200, 1, 16, 16)
    noise = add_noise(x, 0.5, np.random.Generator(np.random.Philox(3)))
    assert abs(float(noise.std()) - 0.5) < 4 * 0.5 / (2 * noise.numel()) ** 0.5
    assert torch.equal(noise, add_noise(x, 0.5, np.random.Generator(np.random.Philox(3))))
