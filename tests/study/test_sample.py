"""The study's input: the shipped sample, files, and what is refused."""

from __future__ import annotations

from importlib import resources

import ml_dtypes
import numpy as np
import pytest

from flamia.study import sample

BF16 = ml_dtypes.bfloat16


def arrays(tokens: int = 40, **other: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((tokens, heads, 32)).astype(np.float32) for heads in (2, 1, 1))
    return {"q": q, "k": k, "v": v, **other}


def test_the_shipped_sample_is_small_and_has_several_documents() -> None:
    file = resources.files("flamia.study") / "data" / "sample.npz"
    assert len(file.read_bytes()) <= 2_000_000
    data = sample.load()
    assert data.q.dtype == BF16 and data.q.shape == data.dout.shape and data.k.shape == data.v.shape
    assert len(data.lengths) >= 3 and 1 in data.lengths and max(data.lengths) > 256
    assert 0.5 <= np.abs(data.dout.astype(np.float32)).max() <= 1
    assert not data.random_dout


@pytest.mark.parametrize("store", [np.uint16, "V2", np.float32, np.float16])
def test_every_way_to_store_elements_is_read(tmp_path, store) -> None:
    given = arrays()
    if store in (np.uint16, "V2"):
        bits = {name: x.astype(BF16) for name, x in given.items()}
        # NumPy writes bfloat16 as two bytes of nothing in particular
        stored = {name: x.view(np.uint16) if store is np.uint16 else x for name, x in bits.items()}
        expected, kind = bits["q"], BF16
    else:
        stored = {name: x.astype(store) for name, x in given.items()}
        expected, kind = stored["q"].astype(np.float32), np.dtype(np.float32)
    np.savez(tmp_path / "x.npz", **stored)
    data = sample.load(tmp_path / "x.npz")
    assert data.q.dtype == kind and (data.q == expected).all()
    assert data.lengths == [40] and data.random_dout and data.dout.dtype == kind


def test_dout_is_scaled_by_a_power_of_two_and_padding_dropped() -> None:
    dout = np.full((40, 2, 32), 3e-6, np.float32)
    data = sample.from_arrays(arrays(dout=dout, cu_seqlens=np.array([0, 7, 7, 30])), "x")
    assert data.lengths == [7, 0, 23] and len(data.q) == 30
    factor = data.dout[0, 0, 0] / dout[0, 0, 0]
    assert np.frexp(factor)[0] == 0.5 and 0.5 <= data.dout.max() <= 1


def test_the_first_tokens_cut_a_document() -> None:
    data = sample.load().first_tokens(50)
    assert data.lengths == [33, 1, 16] and len(data.v) == 50
    assert sample.load().first_tokens(34).lengths == [33, 1]
    with pytest.raises(ValueError, match=r"tokens must be 1 to 402.*got 403"):
        sample.load().first_tokens(403)
    with pytest.raises(ValueError, match=r"got 0"):
        sample.load().first_tokens(0)


def test_layers_are_joined_as_heads() -> None:
    one, two = sample.from_arrays(arrays(), "a"), sample.from_arrays(arrays(), "b")
    joined = sample.join([one, two])
    assert joined.head_counts == (4, 2) and (joined.k[:, 1] == two.k[:, 0]).all()
    other = sample.from_arrays(arrays(cu_seqlens=np.array([0, 30])), "c")
    with pytest.raises(ValueError, match=r"c must have the cu_seqlens of a, \[0, 40\], to be joined, got \[0, 30\]"):
        sample.join([one, other])


BAD = {
    "a key is missing": ({"k": None}, ValueError, r"x must hold q, k and v.*got \['q', 'v'\]"),
    "an unknown key": ({"w": np.zeros(3)}, ValueError, r"x must hold no keys but q, k, v.*got 'w'"),
    "a dtype": ({"v": np.zeros((40, 1, 32))}, TypeError, r"x: v must be bfloat16.*got float64"),
    "a rank": ({"q": np.zeros((40, 32), np.float32)}, ValueError, r"x: q must have shape \(T, H, D\)"),
    "tokens": ({"k": np.zeros((39, 1, 32), np.float32)}, ValueError, r"x: k must have the 40 tokens of q"),
    "heads": ({"q": np.zeros((40, 0, 32), np.float32)}, ValueError, r"x: q must have at least one head"),
    "dout": ({"dout": np.zeros((40, 1, 32), np.float32)}, ValueError, r"x: dout must have the shape of q"),
    "cu_seqlens": ({"cu_seqlens": np.array([0, 41])}, ValueError, r"x: cu_seqlens\[-1\] must be at most .*40, got 41"),
    "no tokens": ({"cu_seqlens": np.array([0, 0])}, ValueError, r"x: q must have at least one token"),
    "not finite": ({"v": np.full((40, 1, 32), np.inf, np.float32)}, ValueError, r"x: v must be finite, got inf at \[0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    change, kind, message = BAD[case]
    given = {name: x for name, x in {**arrays(), **change}.items() if x is not None}
    with pytest.raises(kind, match=message):
        sample.from_arrays(given, "x")


def test_a_file_that_is_no_npz_is_named(tmp_path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("text.npz", "one.npy", "missing.npz"):
        with pytest.raises(ValueError, match=rf"input must be an \.npz file.*{name}"):
            sample.load(tmp_path / name)
