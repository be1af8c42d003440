"""Where chunks come from: slices of arrays, mapped files, Parquet."""

import math
import os
import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyro_evidence import BadInput
from pyro_evidence.data import Parquet, Slices


def test_slices_of_a_mapped_file_are_its_rows(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(25, 3))
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    parts = list(Slices(mapped, torch.arange(25), size=10))
    assert [len(x) for x, _ in parts] == [10, 10, 5]
    np.testing.assert_array_equal(torch.cat([x for x, _ in parts]).numpy(), X)
    assert torch.equal(torch.cat([t for _, t in parts]), torch.arange(25))


def test_slices_of_no_rows_have_their_columns() -> None:
    ((X,),) = Slices(torch.zeros(0, 3))
    assert X.shape == (0, 3)


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(BadInput, match=r"arrays of \[3, 2\] rows"):
        Slices(torch.zeros(3), torch.zeros(2))


def test_a_parquet_file_is_read_in_chunks(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"a": [1.0, 2.0, None, 4.0], "b": [1.0, 2.0, 3.0, 5.0], "n": [7, 8, 9, 10], "s": ["x", "y", "z", "w"]}
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    parts = list(Parquet(path, [("b", "n"), "a"], size=3))
    X, t = (torch.cat(x) for x in zip(*parts, strict=True))
    assert [len(x) for x, _ in parts] == [3, 1]
    assert X.tolist() == [[1.0, 7.0], [2.0, 8.0], [3.0, 9.0], [5.0, 10.0]] and t.isnan().tolist() == [0, 0, 1, 0]
    assert next(iter(Parquet([path, path], ["n"], dtype=None)))[0].dtype == torch.int64
    assert sum(len(x) for (x,) in Parquet([path, path], ["n"])) == 8
    with pytest.raises(BadInput, match="no column c; expected names among a, b, n, s"):
        Parquet(path, ["c"])
    with pytest.raises(BadInput, match="column s holds string; expected numbers"):
        list(Parquet(path, ["s"]))


@pytest.mark.parametrize(
    ("path", "columns", "dtype", "said"),
    [
        (None, ["a"], None, "path=None; expected the path"),
        ([], ["a"], None, "path=.*; expected the path"),
        ([3], ["a"], None, "path=.*; expected the path"),
        ("rows", "ab", None, "columns='ab'; expected for each argument"),
        ("rows", [], None, "columns=.*; expected for each argument"),
        ("rows", [("a", "b"), ()], None, "columns=.*; expected for each argument"),
        ("rows", ["a", 3], None, "columns=.*; expected for each argument"),
        ("rows", [["a", None]], None, "columns=.*; expected for each argument"),
        ("rows", ["a"], "float64", "dtype='float64'; expected one of torch's"),
    ],
)
def test_what_parquet_files_are_not_asked_for_by(path: Any, columns: Any, dtype: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        Parquet(path, columns, dtype=dtype)


# --- Parquet files of other people ---


def written(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_arrays([*map(pyarrow.array, columns.values())], [*columns]), path)
    return path


def with_a_name_twice(path: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    arrays = [pyarrow.array(x) for x in ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0])]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, ["a", "b", "a"]), path)
    return path


def test_a_column_that_occurs_twice_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    path = with_a_name_twice(tmp_path / "rows.parquet")
    with pytest.raises(BadInput, match=r"rows.parquet has a column a twice; .* Rename"):
        Parquet(path, [("a", "b")])
    assert next(iter(Parquet(path, ["b"])))[0].tolist() == [3.0, 4.0]


def test_a_column_that_has_gone_since_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.parquet", {"a": [1.0], "b": [2.0], "t": [3.0]})
    source = Parquet(path, [("a", "b"), "t"])
    assert [x.tolist() for x in next(iter(source))] == [[[1.0, 2.0]], [3.0]]
    written(path, {"a": [1.0], "t": [3.0]})
    with pytest.raises(BadInput, match=r"rows.parquet has no column b; expected names among a, t"):
        list(source)
    with_a_name_twice(path)
    with pytest.raises(BadInput, match="a column a twice"):
        list(Parquet([written(tmp_path / "first", {"a": [1.0]}), path], ["a"]))


LARGE = 2**53 + 1


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        ([1, LARGE], torch.float64),
        ([-LARGE, None], torch.float64),
        ([LARGE, None], None),
        ([2**24 + 1], torch.float32),
        (np.array([2**63 + 1025], dtype=np.uint64), torch.float64),
        ([300], torch.uint8),
        ([2.5], torch.int64),
        ([None, 2.0], torch.int64),
    ],
    ids=str,
)
def test_numbers_that_a_tensor_would_round_are_refused(column: Any, dtype: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "rows.parquet", {"id": column})
    with pytest.raises(BadInput, match=r"column id of .*rows.parquet holds .* which .* would round.*dtype="):
        list(Parquet(path, ["id"], dtype=dtype))


def test_numbers_that_the_common_dtype_of_columns_would_round_are_refused(tmp_path: Path) -> None:
    """They were rounded, in silence."""
    path = written(tmp_path / "rows.parquet", {"id": [LARGE], "x": [0.5]})
    with pytest.raises(BadInput, match=r"column id holds .* 9007199254740993, which torch.float64 would round"):
        list(Parquet(path, [("id", "x")], dtype=None))


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        ([1, LARGE], None),
        ([LARGE], torch.int64),
        ([-(2**53), 2**53], torch.float64),
        ([7, None], torch.float64),
        ([0.1, math.inf, math.nan], torch.float32),
        ([2.0], torch.int64),
        ([True, False], torch.float64),
    ],
    ids=str,
)
def test_numbers_that_a_tensor_holds_come_as_they_are(column: Any, dtype: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "rows.parquet", {"id": column})
    found = torch.cat([x for (x,) in Parquet(path, ["id"], dtype=dtype)])
    expected = torch.tensor([math.nan if x is None else x for x in column])
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0.0, atol=0.0, equal_nan=True)


def test_a_damaged_file_is_read_or_refused(tmp_path: Path) -> None:
    columns = {"a": [float(i) for i in range(50)], "n": [*range(50)], "s": ["x"] * 50}
    path = written(tmp_path / "rows.parquet", columns)
    whole, refused = path.read_bytes(), 0
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 3])):
            damaged[rng.randrange(len(whole))] = rng.randrange(256)
        path.write_bytes(damaged[: rng.choice([len(whole)] * 3 + [rng.randrange(len(whole))])])
        try:
            list(Parquet(path, [("a", "n")]))
        except BadInput as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 50


def test_damage_is_found_by_the_checksums_of_pages(tmp_path: Path) -> None:
    """Without them a bit of a number that has flipped is another number."""
    parquet, path = pytest.importorskip("pyarrow.parquet"), tmp_path / "rows.parquet"
    table = pytest.importorskip("pyarrow").table({"a": [float(i) for i in range(50)]})
    parquet.write_table(table, path, write_page_checksum=True, use_dictionary=False, compression="NONE")
    whole = path.read_bytes()
    for place in range(whole.index(struct.pack("<d", 2.0)), whole.index(struct.pack("<d", 40.0)), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BadInput, match="CRC checksum"):
            list(Parquet(path, ["a"]))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_parquet_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("a,b\n1,2\n")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "text", Path("/dev/zero"), tmp_path / ("x" * 5_000)):
        with pytest.raises(BadInput, match=rf"{path} cannot be read as a Parquet file"):
            Parquet(path, ["a"])
    with open(tmp_path / "sparse", "wb") as file:  # two gigabytes that say they are all footer
        file.write(b"PAR1")
        file.seek(2_000_000_000)
        file.write((2_000_000_000 - 4).to_bytes(4, "little") + b"PAR1")
    begin = time.process_time()
    with pytest.raises(BadInput, match="describes itself in 1,999,999,996 bytes"):
        Parquet(tmp_path / "sparse", ["a"])
    assert time.process_time() - begin < 0.5, "it was read"
    with pytest.raises(BadInput, match="surrogates not allowed"):
        Parquet(tmp_path / "\udcff", ["a"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Parquet(tmp_path / "nowhere", ["a"])
