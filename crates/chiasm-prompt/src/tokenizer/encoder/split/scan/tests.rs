use proptest::prelude::*;
use tokenizers::utils::SysRegex;

use super::*;

fn split_by_regex<'t>(regex: &SysRegex, text: &'t str) -> Vec<&'t str> {
    regex.find_iter(text).map(|(begin, end)| &text[begin..end]).collect()
}

fn split_by_scan<'t>(scan: &Scan, text: &'t str) -> Vec<&'t str> {
    let mut words = Vec::new();
    let mut at = 0;
    while at < text.len() {
        let end = scan.word_end(text, at);
        assert!(end > at, "{text:?} {at}");
        words.push(&text[at..end]);
        at = end;
    }
    words
}

fn scans() -> Vec<(Scan, SysRegex)> {
    let scan = |kind: Kind| {
        let pattern = kind.pattern();
        (Scan::for_pattern(&pattern).unwrap(), SysRegex::new(&pattern).unwrap())
    };
    KINDS.into_iter().map(scan).collect()
}

#[test]
fn model_patterns_are_supported() {
    let kind = |pattern: &str| Scan::for_pattern(pattern).map(|scan| scan.kind);
    assert_eq!(kind(GPT2), Some(Kind::Gpt2));
    let qwen3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(kind(qwen3), Some(Kind::Words { letters: LETTER, max_digits: 1 }));
    let qwen35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(kind(qwen35), Some(Kind::Words { letters: LETTER | MARK, max_digits: 1 }));
    let llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(kind(llama3), Some(Kind::Words { letters: LETTER, max_digits: 3 }));
    let tekken = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(kind(tekken), Some(Kind::CasedWords { max_digits: 1, contractions: false }));
    let gpt_4o = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(kind(gpt_4o), Some(Kind::CasedWords { max_digits: 3, contractions: true }));
    assert_eq!(kind(r"\s+"), None);
}

/// Tests each character alone, beside letters, digits, symbols and spaces, and in contractions.
#[test]
fn every_character_is_split_as_by_the_regex() {
    let scans = scans();
    let mut text = String::new();
    // All characters that have a class or may get one, and a sample of the other planes.
    let codes = (0..0x3_3480).chain(0xe_0000..0xe_0200).chain((0x4_0000..0x11_0000).step_by(97));
    let characters: Vec<char> = codes.filter_map(char::from_u32).collect();
    for chunk in characters.chunks(1 << 12) {
        text.clear();
        for c in chunk {
            text.extend([
                'a', *c, 'B', *c, '1', *c, ' ', *c, *c, '!', *c, '\'', *c, 'e', ' ', '\'', 'l', *c,
            ]);
        }
        for (scan, regex) in &scans {
            let expected = split_by_regex(regex, &text);
            let found = split_by_scan(scan, &text);
            let differs = expected.iter().zip(&found).position(|(a, b)| a != b);
            assert_eq!(
                differs,
                None,
                "{:?}: {:?}",
                scan.kind,
                differs.map(|at| (expected[at], found[at]))
            );
            assert_eq!(expected.len(), found.len());
        }
    }
}

/// Characters of every class, and strings that the patterns name.
const PARTS: [&str; 40] = [
    "a", "b", "Z", "Q", "é", "ß", "ſ", "Σ", "ǅ", "ʰ", "你", "ª", "\u{300}", "\u{5b0}", "\u{903}",
    "1", "23", "٣", "Ⅷ", "½", " ", "  ", "\t", "\n", "\r", "\r\n", "\u{a0}", "\u{85}", "\u{2028}",
    "\u{3000}", "'", "'s", "'LL", "'rE", "'ſ", "!", "/", "-", "\u{200d}", "\u{0}",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn text_is_split_as_by_the_regex(
        parts in prop::collection::vec(
            prop_oneof![
                12 => prop::sample::select(PARTS.to_vec()).prop_map(str::to_owned),
                1 => ".{0,3}",
            ],
            0..16,
        ),
    ) {
        thread_local!(static SCANS: Vec<(Scan, SysRegex)> = scans());
        let text = parts.concat();
        SCANS.with(|scans| {
            for (scan, regex) in scans {
                let expected = split_by_regex(regex, &text);
                prop_assert_eq!(expected, split_by_scan(scan, &text), "{:?}", scan.kind);
            }
            Ok(())
        })?;
    }
}
