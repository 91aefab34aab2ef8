"""Vector files: what is registered, and that everything else is refused by name."""

import pickle

import pytest
import torch
from safetensors.torch import save_file

from eyesplice import SpecError
from eyesplice.integration.vectors import VectorRegistry

WIDTH = 8


@pytest.fixture
def registry():
    return VectorRegistry(torch.float32, WIDTH, bank_rows=16)


def test_names_rows_and_norms(registry, tmp_path):
    values = torch.arange(1.0, WIDTH + 1)
    save_file({"any": values}, tmp_path / "one.safetensors")
    save_file({"a": values, "b": -values}, tmp_path / "two.SAFETENSORS")
    torch.save({"meta": 1, "v": values.double().repeat(3, 1)}, tmp_path / "rows.pt")
    (tmp_path / "README.md").write_text("not a vector")
    (tmp_path / "folder").mkdir()
    registry.load_folder(str(tmp_path))
    assert registry.names() == ["one", "rows", "two.a", "two.b"]
    assert registry.info("rows").layers == 3
    assert registry.info("one").layers is None
    assert registry.info("missing") is None
    assert torch.equal(registry.bank[registry.row("two.b", 5)], -values)
    assert registry.row("rows", 2) == registry.row("rows", 0) + 2
    assert registry.squared_norm("one", 0) == float(values.square().sum())
    assert not registry.bank[0].any()


def test_a_narrow_vector_is_padded_with_zeros(registry):
    registry.add("n", torch.ones(3))
    assert registry.bank[registry.row("n", 0)].tolist() == [1.0] * 3 + [0.0] * 5


class Danger:
    def __reduce__(self):
        return (print, ("code ran",))


FILES = {
    "empty.pt": b"",
    "garbage.pt": b"garbage, not a pickle",
    "text.pt": b"\x80\x02garbage",
    "code.pt": pickle.dumps(Danger()),
    "list.pt": pickle.dumps([1.0, 2.0]),
    "empty.safetensors": b"",
    "header.safetensors": b"\xff" * 64,
    "none.safetensors": (2).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_vector_is_refused_by_name(registry, tmp_path, name, capsys):
    (tmp_path / name).write_bytes(FILES[name])
    with pytest.raises(SpecError, match=name):
        registry.load_folder(str(tmp_path))
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(WIDTH, dtype=torch.int64),
        torch.ones(WIDTH, dtype=torch.complex64),
        torch.ones(WIDTH).to(torch.float8_e4m3fn),
        torch.ones(WIDTH).to(torch.float8_e5m2),
        torch.ones(WIDTH + 1),
        torch.ones(1, 1, 2, WIDTH),
        torch.ones(()),
        torch.ones(0),
        torch.ones(WIDTH).to_sparse(),
        torch.ones(WIDTH, device="meta"),
        torch.full((WIDTH,), float("nan")),
        torch.full((WIDTH,), float("inf")),
        torch.full((WIDTH,), 1e300, dtype=torch.float64),
        torch.ones(16, WIDTH),
    ],
    ids=lambda t: f"{t.dtype}-{t.layout}-{t.device}-{list(t.shape)}",
)
def test_a_tensor_that_cannot_be_a_vector_is_refused(registry, tensor):
    with pytest.raises(SpecError, match="vector v"):
        registry.add("v", tensor)
    assert registry.names() == []


def test_no_room_says_how_much_there_is(registry):
    registry.add("a", torch.ones(10, WIDTH))
    with pytest.raises(SpecError, match=r"with 5 free.*raise bank_rows"):
        registry.add("b", torch.ones(6, WIDTH))
    registry.add("c", torch.ones(5, WIDTH))


def test_rows_of_tensors_of_two_and_three_axes(registry):
    layered = torch.arange(2.0 * 3 * 4).reshape(2, 3, 4)
    registry.add("a/u", layered)
    registry.add("a/v", layered[0])
    registry.add("a/bias", torch.tensor([1.0, 2.0, 3.0]))
    assert registry.info("a/u").shape == (2, 3, 4)
    assert registry.rows("a/u", 1) == (registry.row("a/u", 0) + 3, 3)
    assert registry.row("a/u", 1) == registry.rows("a/u", 1)[0]
    assert registry.rows("a/v", 1) == (registry.row("a/v", 0), 3)
    assert registry.row("a/v", 2) == registry.row("a/v", 0) + 2
    assert registry.rows("a/bias", 1) == (registry.row("a/bias", 0), 1)
    assert torch.equal(registry.tensor("a/u"), layered)
    assert torch.equal(registry.tensor("a/bias"), torch.tensor([1.0, 2.0, 3.0]))
    assert registry.squared_norm("a/u", 1) == float(layered[1, 0].square().sum())
    assert registry.squared_norm("a/v", 2) == float(layered[0, 2].square().sum())
    first, count = registry.rows("a/u", 1)
    assert torch.equal(registry.bank[first : first + count, :4], layered[1])


def test_a_taken_name_is_refused(registry):
    registry.add("v", torch.ones(2))
    with pytest.raises(SpecError, match="one vector of each name"):
        registry.add("v", torch.ones(2))


def test_router_masks_are_made_until_the_bank_is_frozen(registry):
    row = registry.mask_row((2, 0), (1,))
    assert registry.bank[row, :4].tolist() == [1.0, -1.0, 1.0, 0.0]
    assert registry.mask_row((0, 2), (1,)) == row
    registry.freeze()
    assert registry.mask_row((0, 2), (1,)) == row
    with pytest.raises(SpecError, match="masks of the deployed apps"):
        registry.mask_row((3,), ())
    assert len(registry.bank) == row + 1
