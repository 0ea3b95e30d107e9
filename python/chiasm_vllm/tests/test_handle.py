import unittest

from chiasm_vllm.handle import Handle, HandleRefused

FIELDS = {"chiasm": 1, "arena": "00000000000000ff", "lease": 1, "generation": 1, "offset": 1, "length": 1}


class ParseTest(unittest.TestCase):
    def test_each_field_is_an_integer_of_its_width_and_the_arena_a_string(self) -> None:
        self.assertEqual(Handle.parse(FIELDS), ("00000000000000ff", 1, 1, 1, 1))
        widest = {"lease": 2**32 - 1, "generation": 2**32 - 1, "offset": 2**64 - 1, "length": 2**64 - 1}
        self.assertEqual(Handle.parse({**FIELDS, **widest})[1:], tuple(widest.values()))
        for field in FIELDS:
            of_the_other_kind = 1 if field == "arena" else "1"
            for value in (of_the_other_kind, None, True, 1.0, b"1", [1], {"1": 1}, -1, widest.get(field, 1) + 1):
                with self.subTest(field, value=value), self.assertRaises(HandleRefused):
                    Handle.parse({**FIELDS, field: value})
            without = {other: value for other, value in FIELDS.items() if other != field}
            with self.subTest(field), self.assertRaises(HandleRefused):
                Handle.parse(without)

    def test_a_later_version_may_say_more(self) -> None:
        self.assertEqual(Handle.parse({**FIELDS, "hint": 1}), Handle.parse(FIELDS))

    def test_a_refusal_shows_huge_values_in_short(self) -> None:
        with self.assertRaises(HandleRefused) as refusal:
            Handle.parse({**FIELDS, "offset": ["x" * 1_000_000] * 1000})
        self.assertEqual(refusal.exception.cause, "a handle whose offset is no u64")
        self.assertLess(len(str(refusal.exception)), 500)


if __name__ == "__main__":
    unittest.main()
