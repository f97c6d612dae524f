"""The corrected copy of FlashInfer's header: each correction is in it, a header that it was not written for is refused."""

from pathlib import Path

import pytest

from mla_interop.kernels.flashinfer_corrections import CORRECTIONS, HEADER, Correction, corrected, write_corrected

ORIGINAL = "#ifndef GUARD\n#include <first.h>\n" + "\n".join(f"{c.old}  // {i}" for c in CORRECTIONS for i in range(c.count)) + "\n#endif\n"


def test_every_correction_is_made_and_the_rest_is_kept() -> None:
    text = corrected(ORIGINAL)
    for correction in CORRECTIONS:
        assert correction.old not in text and text.count(correction.new) == correction.count
    assert text.index("GUARD") < text.index("void mla_interop_row_sum(") < text.index("#include <first.h>")
    assert text.endswith("\n#endif\n") and text.count("void mla_interop_row_sum(") == 1


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("times", [0, 3])
def test_another_header_is_refused_with_what_would_be_wrong(correction: Correction, times: int) -> None:
    other = ORIGINAL.replace(correction.old, correction.old * times)
    with pytest.raises(ValueError, match="is there") as caught:
        corrected(other)
    assert correction.why in str(caught.value) and HEADER in str(caught.value)


def test_the_copy_comes_first_and_stays_when_nothing_changed(tmp_path: Path) -> None:
    original = tmp_path / "include" / HEADER
    original.parent.mkdir(parents=True)
    original.write_text(ORIGINAL)
    first, second = write_corrected(tmp_path / "include", tmp_path / "copy")
    copy = tmp_path / "copy" / HEADER
    assert first == f"-I{tmp_path / 'copy'}" and second == f"-I{original.parent}"
    assert original.read_text() == ORIGINAL and copy.read_text() == corrected(ORIGINAL)
    before = copy.stat().st_mtime_ns
    write_corrected(tmp_path / "include", tmp_path / "copy")
    assert copy.stat().st_mtime_ns == before
