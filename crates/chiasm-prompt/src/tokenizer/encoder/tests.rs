use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// A tokenizer and its encoder.
struct Pair {
    name: String,
    tokenizer: tokenizers::Tokenizer,
    encoder: Encoder,
    pieces: PieceCache,
}

impl Pair {
    /// Returns `None` if the encoder does not support the tokenizer.
    fn new(name: &str, json: &Value) -> Option<Self> {
        let json = json.to_string().into_bytes();
        let tokenizer = tokenizers::Tokenizer::from_bytes(&json).unwrap();
        let encoder = Encoder::for_tokenizer(&tokenizer, &TokenizerMerges::parse(&json)?)?;
        Some(Self {
            name: name.to_owned(),
            tokenizer,
            encoder,
            pieces: PieceCache::with_short_pieces(1 << 20),
        })
    }

    fn supported(name: &str, json: &Value) -> Self {
        Self::new(name, json).unwrap_or_else(|| panic!("{name} is not supported"))
    }

    /// Returns the ids of the encoder and of `tokenizers`; `None` if the encoder does not support
    /// the text. Checks that cached pieces give the same ids.
    fn encode(&self, text: &str, special: bool) -> Option<(Vec<u32>, Vec<u32>)> {
        let ids = self.encoder.encode(&self.tokenizer, text, special, &PieceCache::new(0));
        for _ in 0..2 {
            assert_eq!(
                self.encoder.encode(&self.tokenizer, text, special, &self.pieces),
                ids,
                "{}: {text:?}",
                self.name
            );
        }
        let ids = ids?;
        let expected = self.tokenizer.encode_fast(text, special).unwrap();
        Some((ids.iter().map(|token| token.0).collect(), expected.get_ids().to_vec()))
    }
}

fn read(path: &Path) -> Value {
    let json = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&json).unwrap()
}

fn fixture(name: &str) -> Value {
    read(
        &Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/goldens/models")
            .join(name)
            .join("tokenizer.json"),
    )
}

fn fixtures() -> Vec<(String, PathBuf)> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR"));
    let models = std::fs::read_dir(crates.join("tests/goldens/models")).unwrap();
    let models =
        models.map(|entry| entry.unwrap().path()).chain([crates.join("../chiasm/assets/model")]);
    models
        .map(|dir| {
            (dir.file_name().unwrap().to_string_lossy().into_owned(), dir.join("tokenizer.json"))
        })
        .collect()
}

const QWEN3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn splits(patterns: &[&str]) -> Value {
    let mut steps: Vec<Value> = patterns
        .iter()
        .map(|pattern| {
            json!({
                "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                "invert": false
            })
        })
        .collect();
    steps.push(json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
    }));
    json!({"type": "Sequence", "pretokenizers": steps})
}

/// Adds many merges, chosen at random from the most frequent letters so that they compete.
fn with_random_merges(mut json: Value, letters: &str, count: usize, seed: u64) -> Value {
    let mut state = seed;
    let mut below = move |end: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % end
    };
    let vocabulary = json["model"]["vocab"].as_object().unwrap();
    let mut vocabulary: BTreeMap<String, u64> =
        vocabulary.iter().map(|(k, v)| (k.clone(), v.as_u64().unwrap())).collect();
    let mut next = vocabulary.values().max().unwrap().max(&1000) + 1;
    let mut tokens: Vec<String> = letters.chars().map(String::from).collect();
    for token in &tokens {
        vocabulary.entry(token.clone()).or_insert_with(|| {
            next += 1;
            next
        });
    }
    let mut merges = Vec::new();
    while merges.len() < count {
        let left = tokens[below(tokens.len())].clone();
        let right = tokens[below(tokens.len())].clone();
        let joined = format!("{left}{right}");
        if joined.chars().count() > 12 {
            continue;
        }
        merges.push(json!([left, right]));
        if !vocabulary.contains_key(&joined) {
            next += 1;
            vocabulary.insert(joined.clone(), next);
            tokens.push(joined);
        }
    }
    json["model"]["vocab"] = json!(vocabulary);
    json["model"]["merges"] = json!(merges);
    json
}

/// Returns one pair for each kind of tokenizer that the encoder supports.
fn kinds() -> Vec<Pair> {
    let bytes = fixture("qwen2_vl");
    let characters = fixture("llama2");
    let mut kinds: Vec<Pair> =
        fixtures().iter().map(|(name, path)| Pair::supported(name, &read(path))).collect();
    let mut add = |name: &str, base: &Value, change: &dyn Fn(&mut Value)| {
        let mut json = base.clone();
        change(&mut json);
        kinds.push(Pair::supported(name, &json));
    };
    let dense_bytes = with_random_merges(bytes.clone(), "etaoin sĠĠĠ'tsẁéÃ©Ì", 900, 1);
    let dense_characters = with_random_merges(characters.clone(), "etaoins▁▁é北", 900, 2);
    add("qwen3 pattern", &dense_bytes, &|json| {
        json["normalizer"] = json!({"type": "NFC"});
        json["pre_tokenizer"] = splits(&[QWEN3]);
    });
    add("gpt-4o pattern, whole words first", &dense_bytes, &|json| {
        json["pre_tokenizer"] = splits(&[GPT_4O]);
        json["model"]["ignore_merges"] = json!(true);
    });
    add("deepseek's steps", &dense_bytes, &|json| {
        json["normalizer"] = json!({"type": "Sequence", "normalizers": []});
        let last = r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        json["pre_tokenizer"] = splits(&[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", last]);
    });
    add("no pattern", &dense_bytes, &|json| json["pre_tokenizer"] = splits(&[]));
    add("legacy merges", &dense_bytes, &|json| {
        let merges = json["model"]["merges"].as_array().unwrap().iter();
        let merges = merges
            .map(|merge| format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()));
        json["model"]["merges"] =
            json!(merges.filter(|merge| merge.matches(' ').count() == 1).collect::<Vec<_>>());
    });
    add("merges across spaces", &dense_characters, &|_| {});
    let few_across = with_random_merges(characters.clone(), "etaoins▁▁é北", 900, 3);
    add("merges across spaces after two characters", &few_across, &|json| {
        let merges = json["model"]["merges"].as_array_mut().unwrap();
        merges.retain(|merge| {
            let left = merge[0].as_str().unwrap();
            let right = merge[1].as_str().unwrap();
            !right.starts_with('▁') || left.ends_with(['▁', 'e', '北'])
        });
    });
    add("gemma", &characters, &|json| {
        json["normalizer"] = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        json["pre_tokenizer"] = json!({
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
            "invert": false
        });
    });
    for scheme in ["first", "always", "never"] {
        for split in [false, true] {
            for base in [&characters, &dense_characters] {
                add(&format!("metaspace {scheme} {split}"), base, &|json| {
                    json["normalizer"] = Value::Null;
                    json["pre_tokenizer"] = json!({
                        "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme,
                        "split": split
                    });
                    json["added_tokens"][2]["normalized"] = json!(true);
                });
            }
        }
    }
    add("normalised added tokens", &characters, &|json| {
        for token in json["added_tokens"].as_array_mut().unwrap() {
            token["normalized"] = json!(true);
        }
    });
    add("tokens that strip spaces", &bytes, &|json| {
        json["added_tokens"][1]["rstrip"] = json!(true)
    });
    add("bos and eos", &bytes, &|json| {
        let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        json["post_processor"] = json!({
            "type": "TemplateProcessing", "single": [special("b"), text, special("e")],
            "pair": [text],
            "special_tokens": {
                "b": {"id": "b", "ids": [1, 2], "tokens": ["x", "y"]},
                "e": {"id": "e", "ids": [3], "tokens": ["z"]}
            }
        });
    });
    let mut split_special = Pair::supported("special tokens as text", &bytes);
    split_special.tokenizer.set_encode_special_tokens(true);
    let json = bytes.to_string();
    split_special.encoder = Encoder::for_tokenizer(
        &split_special.tokenizer,
        &TokenizerMerges::parse(json.as_bytes()).unwrap(),
    )
    .unwrap();
    kinds.push(split_special);
    kinds
}

/// The parts of texts: characters of every kind, special tokens and halves of them, and characters
/// that normalization changes.
const PARTS: [&str; 74] = [
    "the",
    " quick",
    " brown",
    "tion",
    "est",
    "toast",
    " seasons",
    "e",
    "t",
    "a",
    "s",
    "n",
    "I",
    "HTTP",
    "Server",
    "'s",
    "'LL",
    "'re",
    "'",
    "'ſ",
    " ",
    "  ",
    "        ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    "\u{a0}",
    "\u{85}",
    "\u{2028}",
    "\u{3000}",
    "0",
    "42",
    "1234567890",
    "٣",
    "Ⅷ",
    "½",
    "²",
    "!",
    "...",
    "();",
    "{}",
    "</",
    "//",
    "=>",
    "é",
    "e\u{301}",
    "\u{301}",
    "ş\u{307}",
    "\u{315}\u{300}",
    "\u{212b}",
    "ß",
    "ſ",
    "ǅ",
    "ʰ",
    "Σ",
    "你好",
    "北",
    "京",
    "こ",
    "한",
    "\u{1112}\u{1161}\u{11ab}",
    "\u{1161}",
    "สวัสดี",
    "नमस्ते",
    "👩‍👩‍👧🏽",
    "\u{200d}",
    "\u{fffd}",
    "\0",
    "▁",
    "▁▁",
    "<|im_end|>",
    "<|im_",
    "</s>",
];

fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        30 => prop::sample::select(PARTS.to_vec()).prop_map(str::to_owned),
        3 => prop::sample::select(vec![
            "<|im_start|>", "<|vision_start|>", "<|image_pad|>", "<s>", "<unk>", "<pad>", "<0x41>",
            "|>",
        ])
        .prop_map(str::to_owned),
        2 => "[a-z ]{0,12}",
        2 => any::<char>().prop_map(String::from),
        1 => "[etaoins]{20,80}",
        1 => ".{0,6}",
    ];
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 800, ..ProptestConfig::default() })]

    #[test]
    fn text_has_the_tokens_of_tokenizers(text in text(), special in any::<bool>()) {
        thread_local!(static KINDS: Vec<Pair> = kinds());
        KINDS.with(|kinds| {
            for pair in kinds {
                // Twice: the second time from the cache.
                for _ in 0..2 {
                    if let Some((ids, expected)) = pair.encode(&text, special) {
                        prop_assert_eq!(ids, expected, "{}", &pair.name);
                    }
                }
            }
            Ok(())
        })?;
    }
}

#[test]
fn every_character_has_the_tokens_of_tokenizers() {
    let kinds = kinds();
    for name in ["qwen3 pattern", "gpt-4o pattern, whole words first", "gemma"] {
        let pair = kinds.iter().find(|pair| pair.name == name).unwrap();
        // All characters that are normalized or have a class, and a sample of the other planes.
        let codes =
            (0..0x3_3480).chain(0xe_0000..0xe_0200).chain((0x4_0000..0x11_0000).step_by(97));
        let characters: Vec<char> = codes.filter_map(char::from_u32).collect();
        for chunk in characters.chunks(1 << 11) {
            // Each character before and after a letter, and alone.
            let text: String = chunk.iter().flat_map(|c| [*c, 'e', *c, ' ', *c, '\n']).collect();
            let (ids, expected) = pair.encode(&text, false).unwrap();
            assert!(
                ids == expected,
                "{}: among U+{:04X} and the following",
                pair.name,
                u32::from(chunk[0])
            );
        }
    }
}

#[test]
fn texts_with_space_stripping_tokens_are_unsupported() {
    let mut json = fixture("qwen2_vl");
    json["added_tokens"][1]["lstrip"] = json!(true);
    let token = json["added_tokens"][1]["content"].as_str().unwrap().to_owned();
    let pair = Pair::supported("lstrip", &json);
    assert!(pair.encode(&format!("a {token}"), false).is_none());
    let (ids, expected) = pair.encode("a <|im_end|>", false).unwrap();
    assert_eq!(ids, expected);
}

#[test]
fn tokenizers_with_unknown_settings_are_unsupported() {
    let check = |name: &str, base: &str, path: &str, value: Value| {
        let mut json = fixture(base);
        *json.pointer_mut(path).unwrap() = value;
        assert!(Pair::new(name, &json).is_none(), "{name}");
    };
    check("lower case", "qwen2_vl", "/normalizer", json!({"type": "Lowercase"}));
    check("nfkc", "qwen2_vl", "/normalizer", json!({"type": "NFKC"}));
    check("dropout", "qwen2_vl", "/model/dropout", json!(0.1));
    check("suffix", "qwen2_vl", "/model/end_of_word_suffix", json!("</w>"));
    check("no bytes for unknown characters", "llama2", "/model/byte_fallback", json!(false));
    let prefix = json!({
        "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true
    });
    check("space before every text", "qwen2_vl", "/pre_tokenizer", prefix);
    check("white space splits", "qwen2_vl", "/pre_tokenizer", json!({"type": "Whitespace"}));
    let removed =
        json!({"type": "Split", "pattern": {"Regex": " "}, "behavior": "Removed", "invert": false});
    check("matches are removed", "qwen2_vl", "/pre_tokenizer", removed);
}

#[test]
fn unsplit_text_is_split_where_nothing_merges_across() {
    let splitters = |json: &Value| Pair::supported("", json).encoder.splitters;
    let mut llama2 = fixture("llama2");
    llama2["model"]["merges"] = json!([]);
    let not_after = |json: &Value| match &splitters(json)[..] {
        [Splitter::BeforeRuns { not_after, .. }] => not_after.clone(),
        _ => panic!("not split before runs"),
    };
    assert!(not_after(&llama2).is_empty());
    let mut across = llama2.clone();
    let id = across["model"]["vocab"].as_object().unwrap().len() + 1000;
    across["model"]["vocab"]["e▁"] = json!(id);
    across["model"]["merges"].as_array_mut().unwrap().push(json!(["e", "▁"]));
    assert_eq!(not_after(&across), ['e']);
    let mut byte_merge = across.clone();
    byte_merge["model"]["vocab"]["<0x41>e"] = json!(id + 1);
    byte_merge["model"]["merges"].as_array_mut().unwrap().push(json!(["<0x41>", "e"]));
    assert!(splitters(&byte_merge).is_empty());
    assert!(splitters(&with_random_merges(llama2, "etaoins▁▁é北h", 900, 2)).is_empty());
}

#[test]
fn threads_share_an_encoder() {
    let pair = Pair::supported("llama2", &fixture("llama2"));
    let text = "the quick brown fox jumps over the lazy dog ".repeat(20);
    let (_, expected) = pair.encode(&text, true).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                (0..50).for_each(|_| assert_eq!(pair.encode(&text, true).unwrap().0, expected))
            });
        }
    });
    let idle = pair.encoder.idle.lock().unwrap().len();
    assert!((1..=pair.encoder.max_idle).contains(&idle), "{idle}");
}
