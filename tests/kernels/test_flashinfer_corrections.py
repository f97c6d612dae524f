"""The corrected copies of FlashInfer's headers: each correction is in them, a header that they were not written for is refused."""

from pathlib import Path

import pytest

from mla_interop.kernels.flashinfer_corrections import MAIN_LOOP_3, PREFILL_2, CorrectedHeader, Correction

HEADERS = [pytest.param(PREFILL_2, id="fa2"), pytest.param(MAIN_LOOP_3, id="fa3")]


def original(header: CorrectedHeader) -> str:
    return "#ifndef GUARD\n#include <first.h>\n" + "\n".join(f"{c.old}  // {i}" for c in header.corrections for i in range(c.count)) + "\n#endif\n"


@pytest.mark.parametrize("header", HEADERS)
def test_every_correction_is_made_and_the_rest_is_kept(header: CorrectedHeader) -> None:
    text = header.corrected(original(header))
    for correction in header.corrections:
        assert text.count(correction.new) == correction.count
    rest = text
    for correction in header.corrections:
        rest = rest.replace(correction.new, correction.old)
    assert rest.replace(header.preamble, "", 1) == original(header)
    assert text.index("GUARD") < text.index(header.preamble + "#include <first.h>")


@pytest.mark.parametrize(("header", "correction"), [(header, correction) for header in (PREFILL_2, MAIN_LOOP_3) for correction in header.corrections])
@pytest.mark.parametrize("times", [0, 3])
def test_another_header_is_refused_with_what_would_be_wrong(header: CorrectedHeader, correction: Correction, times: int) -> None:
    other = original(header).replace(correction.old, correction.old * times)
    with pytest.raises(ValueError, match="is there") as caught:
        header.corrected(other)
    assert correction.why in str(caught.value) and header.header in str(caught.value)


def test_the_copy_comes_first_and_stays_when_nothing_changed(tmp_path: Path) -> None:
    text = original(PREFILL_2)
    there = tmp_path / "include" / PREFILL_2.header
    there.parent.mkdir(parents=True)
    there.write_text(text)
    first, second = PREFILL_2.write_corrected(tmp_path / "include", tmp_path / "copy")
    copy = tmp_path / "copy" / PREFILL_2.header
    assert first == f"-I{tmp_path / 'copy'}" and second == f"-I{there.parent}"
    assert there.read_text() == text and copy.read_text() == PREFILL_2.corrected(text)
    before = copy.stat().st_mtime_ns
    PREFILL_2.write_corrected(tmp_path / "include", tmp_path / "copy")
    assert copy.stat().st_mtime_ns == before
