use proptest::prelude::*;
use tokenizers::utils::SysRegex;

use super::*;

fn by_engine<'t>(regex: &SysRegex, text: &'t str) -> Vec<&'t str> {
    regex.find_iter(text).map(|(begin, end)| &text[begin..end]).collect()
}

fn by_hand<'t>(scan: &Scan, text: &'t str) -> Vec<&'t str> {
    let mut words = Vec::new();
    let mut at = 0;
    while at < text.len() {
        let end = scan.end_of_word(text, at);
        assert!(end > at, "{text:?} {at}");
        words.push(&text[at..end]);
        at = end;
    }
    words
}

fn scans() -> Vec<(Scan, SysRegex)> {
    let scan =
        |kind: Kind| (Scan::of(&kind.pattern()).unwrap(), SysRegex::new(&kind.pattern()).unwrap());
    KINDS.into_iter().map(scan).collect()
}

#[test]
fn the_patterns_are_those_of_the_models() {
    let known = |pattern: &str| Scan::of(pattern).map(|scan| scan.kind);
    assert_eq!(known(GPT2), Some(Kind::Gpt2));
    let qwen3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(known(qwen3), Some(Kind::Words { letters: LETTER, digits: 1 }));
    let qwen35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(known(qwen35), Some(Kind::Words { letters: LETTER | MARK, digits: 1 }));
    let llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(known(llama3), Some(Kind::Words { letters: LETTER, digits: 3 }));
    let tekken = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(known(tekken), Some(Kind::CasedWords { digits: 1, contractions: false }));
    let gpt_4o = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(known(gpt_4o), Some(Kind::CasedWords { digits: 3, contractions: true }));
    assert_eq!(known(r"\s+"), None);
}

/// Each alone, beside letters, digits, signs and spaces, and in contractions.
#[test]
fn every_character_is_split_as_the_engine_does() {
    let scans = scans();
    let mut text = String::new();
    // All that have a class or may get one, and some of the planes without.
    let codes = (0..0x3_3480).chain(0xe_0000..0xe_0200).chain((0x4_0000..0x11_0000).step_by(97));
    let characters: Vec<char> = codes.filter_map(char::from_u32).collect();
    for some in characters.chunks(1 << 12) {
        text.clear();
        for c in some {
            text.extend([
                'a', *c, 'B', *c, '1', *c, ' ', *c, *c, '!', *c, '\'', *c, 'e', ' ', '\'', 'l', *c,
            ]);
        }
        for (scan, regex) in &scans {
            let (expected, found) = (by_engine(regex, &text), by_hand(scan, &text));
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

/// Characters of every class and what patterns name.
const PARTS: [&str; 40] = [
    "a", "b", "Z", "Q", "é", "ß", "ſ", "Σ", "ǅ", "ʰ", "你", "ª", "\u{300}", "\u{5b0}", "\u{903}",
    "1", "23", "٣", "Ⅷ", "½", " ", "  ", "\t", "\n", "\r", "\r\n", "\u{a0}", "\u{85}", "\u{2028}",
    "\u{3000}", "'", "'s", "'LL", "'rE", "'ſ", "!", "/", "-", "\u{200d}", "\u{0}",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_split_as_the_engine_does(
        parts in prop::collection::vec(prop_oneof![12 => prop::sample::select(PARTS.to_vec()).prop_map(str::to_owned), 1 => ".{0,3}"], 0..16),
    ) {
        thread_local!(static SCANS: Vec<(Scan, SysRegex)> = scans());
        let text = parts.concat();
        SCANS.with(|scans| {
            for (scan, regex) in scans {
                prop_assert_eq!(by_engine(regex, &text), by_hand(scan, &text), "{:?}", scan.kind);
            }
            Ok(())
        })?;
    }
}
