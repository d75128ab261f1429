"""What a secure sum shows: the plain mean, or a line on who is not in it."""

import pytest
import torch

from coterie.exchange.base import Message, SecureAggregation
from coterie.exchange.secure_sum import SUMMED, TooFewToSum, count_bytes, sum_messages


def make_message(rows: int = 6, columns: int = 50, seed: int = 0, **dtype) -> Message:
    draw = torch.Generator().manual_seed(seed)
    params = torch.randn(rows, columns, generator=draw, **dtype)
    samples = torch.randint(1, 1000, (rows,), generator=draw).double()
    return Message(params, {"samples": samples}, torch.arange(rows) + 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_is_the_plain_mean_in_float64_to_a_millionth(dtype):
    message = make_message(dtype=dtype)
    summed, refused = sum_messages(message, SecureAggregation())
    weights = message.fields["samples"]
    plain = (message.params.double() * weights[:, None]).sum(0) / weights.sum()
    assert not refused
    assert summed.params.dtype == dtype
    assert summed.params.shape == (1, 50)
    assert float((summed.params[0].double() - plain).abs().max()) < 1e-6
    assert float(summed.fields["samples"]) == float(weights.sum())
    assert int(summed.fields[SUMMED]) == 6


def test_a_sum_has_one_value_whatever_the_order_of_the_clients():
    message = make_message()
    turned = message.take_rows(torch.tensor([3, 1, 5, 0, 4, 2]))
    one, other = (sum_messages(m, SecureAggregation())[0] for m in (message, turned))
    assert torch.equal(one.params, other.params)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (16384.5, "its model has numbers up to 16384.5; a secure sum over 6 clients holds at most 16383"),
        (-20000.0, "its model has numbers up to 20000; a secure sum"),
        (float("nan"), "its model is not finite"),
        (float("inf"), "its model is not finite"),
    ],
)  # fmt: skip
def test_a_model_out_of_range_is_left_out_by_name_and_never_wraps(value, said):
    message = make_message()
    message.params[2, 7] = value
    summed, refused = sum_messages(message, SecureAggregation())
    assert list(refused) == [12]
    assert said in refused[12]
    kept = torch.tensor([0, 1, 3, 4, 5])
    weights = message.fields["samples"][kept]
    plain = (message.params[kept].double() * weights[:, None]).sum(0) / weights.sum()
    assert float((summed.params[0].double() - plain).abs().max()) < 1e-6


def test_a_number_at_the_limit_is_in_the_sum():
    message = make_message()
    message.params[:, 0] = 16383.0
    summed, refused = sum_messages(message, SecureAggregation())
    assert not refused
    assert abs(float(summed.params[0, 0]) - 16383.0) < 2e-3  # the spacing of float32 there


def test_fewer_than_the_threshold_are_not_summed():
    message = make_message()
    message.params[:2, 0] = torch.nan
    with pytest.raises(TooFewToSum, match="4 of 6 clients can be summed; at least 5 must be"):
        sum_messages(message, SecureAggregation())
    assert len(sum_messages(message, SecureAggregation(threshold=0.51))[1]) == 2


def test_two_clients_are_never_summed():
    with pytest.raises(TooFewToSum, match="2 of 2 clients can be summed; at least 3"):
        sum_messages(make_message(2), SecureAggregation())
    with pytest.raises(TooFewToSum, match="at least 7"):
        sum_messages(make_message(6), SecureAggregation(min_clients=7))


def test_a_client_sends_at_most_one_and_a_half_times_the_bytes_of_its_model():
    """From 16,000 parameters on with 64 clients; small models are outweighed by keys and shares."""
    for params, clients in ((1_000_000, 100), (16_000, 64), (600_000, 1000)):
        up, down = count_bytes(params, clients)
        plain = 4 * params + 4
        assert up < 1.5 * plain
        assert up + down + plain < 1.5 * 2 * plain
