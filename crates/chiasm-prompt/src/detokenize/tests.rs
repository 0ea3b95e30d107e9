use std::path::Path;

use proptest::prelude::*;

use super::*;

/// Loads a model's tokenizer. `qwen2_vl` is byte-level, `llama2` falls back to byte tokens.
fn tokenizer(model: &str) -> Tokenizer {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models");
    Tokenizer::from_model_dir(&models.join(model)).unwrap()
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    tokenizer.encode(text, false).unwrap()
}

fn detokenize(
    tokenizer: &Tokenizer,
    prompt: &[TokenId],
    answer: &[TokenId],
    skip_special: bool,
) -> (String, usize) {
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), prompt, skip_special);
    let mut text = String::new();
    for token in answer {
        let delta = detokenizer.push(*token);
        assert!(!delta.ends_with('\u{fffd}'), "half a character in {delta:?}");
        text += &delta;
    }
    text += &detokenizer.finish();
    (text, detokenizer.pending())
}

/// Creates a detokenizer that is primed with the whole prompt, as vLLM's is.
fn primed(tokenizer: &Tokenizer, prompt: &[TokenId], skip_special: bool) -> Detokenizer {
    let complete = prompt.len() - count_open_tokens(tokenizer, prompt);
    let ids = prompt.iter().map(|token| token.0).collect();
    let prefix = tokenizer.decode(&prompt[..complete], skip_special);
    Detokenizer {
        tokenizer: tokenizer.clone(),
        skip_special,
        ids,
        prefix,
        prefix_index: complete,
        pending: 0,
    }
}

#[test]
fn character_is_returned_with_its_last_token() {
    for model in ["qwen2_vl", "llama2"] {
        let tokenizer = tokenizer(model);
        let smile = encode(&tokenizer, "a🙂");
        assert!(smile.len() > 3, "{model} has a token for it");
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), &encode(&tokenizer, "the"), true);
        let deltas: Vec<String> = smile.iter().map(|token| detokenizer.push(*token)).collect();
        assert_eq!(deltas.concat().trim_start(), "a🙂");
        assert_eq!(deltas.last().map(String::as_str), Some("🙂"));
        assert_eq!(detokenizer.pending(), 0);
    }
}

#[test]
fn character_begun_in_the_prompt_excludes_prompt_text() {
    let tokenizer = tokenizer("qwen2_vl");
    let mut prompt = encode(&tokenizer, "What is this? é🙂");
    let last = prompt.pop().unwrap();
    assert_eq!(detokenize(&tokenizer, &prompt, &[last], true), ("🙂".to_owned(), 0));
    let x = encode(&tokenizer, "x")[0];
    assert_eq!(detokenize(&tokenizer, &prompt, &[x], true), ("\u{fffd}x".to_owned(), 0));
}

#[test]
fn replacement_character_of_the_prompt_is_not_repeated() {
    let tokenizer = tokenizer("qwen2_vl");
    let answer = encode(&tokenizer, " ok");
    for prompt in ["\u{fffd}", "so \u{fffd}\u{fffd}", ""] {
        assert_eq!(detokenize(&tokenizer, &encode(&tokenizer, prompt), &answer, true).0, " ok");
    }
}

#[test]
fn special_tokens_yield_text_unless_skipped() {
    let tokenizer = tokenizer("qwen2_vl");
    let answer = encode(&tokenizer, "a<|im_end|>");
    assert_eq!(detokenize(&tokenizer, &[], &answer, true), ("a".to_owned(), 1));
    assert_eq!(detokenize(&tokenizer, &[], &answer, false), ("a<|im_end|>".to_owned(), 0));
}

#[test]
fn unknown_ids_yield_no_text() {
    let tokenizer = tokenizer("qwen2_vl");
    let a = encode(&tokenizer, "a")[0];
    assert_eq!(detokenize(&tokenizer, &[TokenId(u32::MAX)], &[TokenId(1 << 30), a], true).0, "a");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn pieces_join_to_the_whole_text(
        prompt in prop::collection::vec(0u32..345, 0..50),
        answer in prop::collection::vec(0u32..345, 0..40),
        skip_special: bool,
    ) {
        let tokenizer = tokenizer("qwen2_vl");
        let ids = |ids: &[u32]| -> Vec<TokenId> { ids.iter().copied().map(TokenId).collect() };
        let mut prompt = ids(&prompt);
        let answer = ids(&answer);
        // The answer changes the text of a prompt that ends within a character.
        while count_open_tokens(&tokenizer, &prompt) > 0 {
            prompt.pop();
        }
        let (text, pending) = detokenize(&tokenizer, &prompt, &answer, skip_special);
        let before = tokenizer.decode(&prompt, skip_special);
        let whole = tokenizer.decode(&[prompt, answer.clone()].concat(), skip_special);
        prop_assume!(whole.starts_with(&before));
        let whole = &whole[before.len()..];
        prop_assert!(whole.starts_with(&text), "{:?} is not a prefix of {:?}", text, whole);
        if whole.ends_with('\u{fffd}') {
            prop_assert!(pending > 0);
        } else {
            prop_assert_eq!(&text, whole);
        }
    }

    #[test]
    fn text_survives_the_round_trip(text in "\\PC{0,40}", prompt in "\\PC{0,20}") {
        for model in ["qwen2_vl", "llama2"] {
            let tokenizer = tokenizer(model);
            let answer = encode(&tokenizer, &text);
            let whole = tokenizer.decode(&answer, true);
            let prompt = [encode(&tokenizer, &prompt), encode(&tokenizer, "the")].concat();
            let (pieces, _) = detokenize(&tokenizer, &prompt, &answer, true);
            // Llama 2's tokenizer puts a space before every text, and its decoder removes it only
            // at the very beginning.
            let space = if model == "llama2" && !text.is_empty() { " " } else { "" };
            if !whole.ends_with('\u{fffd}') {
                prop_assert_eq!(pieces, format!("{space}{whole}"));
            }
        }
    }

    #[test]
    fn context_free_tokens_match_the_decode_stream(
        prompt in prop::collection::vec(0u32..345, 0..6),
        answer in prop::collection::vec(prop_oneof![0u32..345, Just(u32::MAX)], 0..60),
        skip_special: bool,
    ) {
        for model in ["qwen2_vl", "llama3", "llama2"] {
            let tokenizer = tokenizer(model);
            let prompt: Vec<TokenId> = prompt.iter().copied().map(TokenId).collect();
            let mut detokenizer = Detokenizer::new(tokenizer.clone(), &prompt, skip_special);
            let mut stream = primed(&tokenizer, &prompt, skip_special);
            for token in answer.iter().copied().map(TokenId) {
                let expected = match stream.step(token) {
                    Ok(text) => text.unwrap_or_default(),
                    Err(_) => break,
                };
                prop_assert_eq!(detokenizer.push(token), expected);
            }
        }
    }

    #[test]
    fn random_tokens_of_any_kind_do_not_panic(
        prompt in prop::collection::vec(0u32..400, 0..50),
        answer in prop::collection::vec(0u32..400, 0..60),
        skip_special: bool,
    ) {
        let tokenizer = tokenizer("llama2");
        let ids = |ids: &[u32]| -> Vec<TokenId> { ids.iter().copied().map(TokenId).collect() };
        detokenize(&tokenizer, &ids(&prompt), &ids(&answer), skip_special);
    }
}
