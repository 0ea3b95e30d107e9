"""Tests of parsing handles."""

import unittest

from chiasm_vllm.handle import Handle, HandleRefused

FIELDS = {
    "chiasm": 1,
    "arena": "00000000000000ff",
    "lease": 1,
    "generation": 1,
    "offset": 1,
    "length": 1,
}


class ParseTest(unittest.TestCase):
    def test_field_of_wrong_type_or_width_is_refused(self) -> None:
        self.assertEqual(Handle.parse(FIELDS), ("00000000000000ff", 1, 1, 1, 1))
        widest = {
            "lease": 2**32 - 1,
            "generation": 2**32 - 1,
            "offset": 2**64 - 1,
            "length": 2**64 - 1,
        }
        self.assertEqual(Handle.parse({**FIELDS, **widest})[1:], tuple(widest.values()))
        for field in FIELDS:
            wrong_type = 1 if field == "arena" else "1"
            too_wide = widest.get(field, 1) + 1
            for value in (wrong_type, None, True, 1.0, b"1", [1], {"1": 1}, -1, too_wide):
                with self.subTest(field, value=value), self.assertRaises(HandleRefused):
                    Handle.parse({**FIELDS, field: value})
            without = {other: value for other, value in FIELDS.items() if other != field}
            with self.subTest(field), self.assertRaises(HandleRefused):
                Handle.parse(without)

    def test_unknown_field_is_ignored(self) -> None:
        self.assertEqual(Handle.parse({**FIELDS, "hint": 1}), Handle.parse(FIELDS))

    def test_refusal_shortens_huge_values(self) -> None:
        with self.assertRaises(HandleRefused) as refusal:
            Handle.parse({**FIELDS, "offset": ["x" * 1_000_000] * 1000})
        self.assertEqual(refusal.exception.cause, "a handle whose offset is not a u64")
        self.assertLess(len(str(refusal.exception)), 500)


if __name__ == "__main__":
    unittest.main()
