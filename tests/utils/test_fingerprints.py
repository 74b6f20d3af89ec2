"""Fingerprints change where what they stand for does."""

from hyperdflash.utils.fingerprints import sampled_fingerprint


def test_large_files_are_sampled_over_their_whole_length(tmp_path):
    path = tmp_path / "large"
    data = bytearray(20 << 20)
    path.write_bytes(data)
    before = sampled_fingerprint(path)
    for place in (0, 10_500_000, len(data) - 1):
        changed = bytearray(data)
        changed[max(place - 200_000, 0) : place + 200_000] = b"x" * (
            min(place + 200_000, len(data)) - max(place - 200_000, 0)
        )
        path.write_bytes(changed)
        assert sampled_fingerprint(path) != before
    path.write_bytes(data + b"\0")
    assert sampled_fingerprint(path) != before
