use std::path::Path;

use proptest::prelude::*;

use super::*;

/// `qwen2_vl` is byte-level, `llama2` falls back to byte tokens.
fn tokenizer(model: &str) -> Tokenizer {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models");
    Tokenizer::from_model_dir(&models.join(model)).unwrap()
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    tokenizer.encode(text, false).unwrap()
}

fn in_pieces(
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

/// A stream that knows the whole prompt, as vLLM's does.
fn primed(tokenizer: &Tokenizer, prompt: &[TokenId], skip_special: bool) -> Detokenizer {
    let complete = prompt.len() - open_tokens(tokenizer, prompt);
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
fn a_character_comes_out_whole_with_its_last_token() {
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
fn a_character_that_begins_in_the_prompt_comes_out_without_the_prompt() {
    let tokenizer = tokenizer("qwen2_vl");
    let mut prompt = encode(&tokenizer, "What is this? é🙂");
    let last = prompt.pop().unwrap();
    assert_eq!(in_pieces(&tokenizer, &prompt, &[last], true), ("🙂".to_owned(), 0));
    let x = encode(&tokenizer, "x")[0];
    assert_eq!(in_pieces(&tokenizer, &prompt, &[x], true), ("\u{fffd}x".to_owned(), 0));
}

#[test]
fn a_replacement_character_in_the_prompt_stays_in_the_prompt() {
    let tokenizer = tokenizer("qwen2_vl");
    let answer = encode(&tokenizer, " ok");
    for prompt in ["\u{fffd}", "so \u{fffd}\u{fffd}", ""] {
        assert_eq!(in_pieces(&tokenizer, &encode(&tokenizer, prompt), &answer, true).0, " ok");
    }
}

#[test]
fn special_tokens_give_text_only_when_wanted() {
    let tokenizer = tokenizer("qwen2_vl");
    let answer = encode(&tokenizer, "a<|im_end|>");
    assert_eq!(in_pieces(&tokenizer, &[], &answer, true), ("a".to_owned(), 1));
    assert_eq!(in_pieces(&tokenizer, &[], &answer, false), ("a<|im_end|>".to_owned(), 0));
}

#[test]
fn unknown_ids_give_no_text() {
    let tokenizer = tokenizer("qwen2_vl");
    let a = encode(&tokenizer, "a")[0];
    assert_eq!(in_pieces(&tokenizer, &[TokenId(u32::MAX)], &[TokenId(1 << 30), a], true).0, "a");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn the_pieces_are_the_whole(
        prompt in prop::collection::vec(0u32..345, 0..50),
        answer in prop::collection::vec(0u32..345, 0..40),
        skip_special: bool,
    ) {
        let tokenizer = tokenizer("qwen2_vl");
        let ids = |ids: &[u32]| -> Vec<TokenId> { ids.iter().copied().map(TokenId).collect() };
        let mut prompt = ids(&prompt);
        let answer = ids(&answer);
        // A prompt that ends within a character has a text that the answer changes.
        while open_tokens(&tokenizer, &prompt) > 0 {
            prompt.pop();
        }
        let (text, pending) = in_pieces(&tokenizer, &prompt, &answer, skip_special);
        let before = tokenizer.decode(&prompt, skip_special);
        let whole = tokenizer.decode(&[prompt, answer.clone()].concat(), skip_special);
        prop_assume!(whole.starts_with(&before));
        let whole = &whole[before.len()..];
        prop_assert!(whole.starts_with(&text), "{:?} is no beginning of {:?}", text, whole);
        if whole.ends_with('\u{fffd}') {
            prop_assert!(pending > 0);
        } else {
            prop_assert_eq!(&text, whole);
        }
    }

    #[test]
    fn any_text_survives(text in "\\PC{0,40}", prompt in "\\PC{0,20}") {
        for model in ["qwen2_vl", "llama2"] {
            let tokenizer = tokenizer(model);
            let answer = encode(&tokenizer, &text);
            let whole = tokenizer.decode(&answer, true);
            let prompt = [encode(&tokenizer, &prompt), encode(&tokenizer, "the")].concat();
            let (pieces, _) = in_pieces(&tokenizer, &prompt, &answer, true);
            // The second kind puts a space before every text, and takes it away again only at the
            // very beginning.
            let space = if model == "llama2" && !text.is_empty() { " " } else { "" };
            if !whole.ends_with('\u{fffd}') {
                prop_assert_eq!(pieces, format!("{space}{whole}"));
            }
        }
    }

    #[test]
    fn whole_characters_come_out_as_the_stream_gives_them(
        prompt in prop::collection::vec(0u32..345, 0..6),
        answer in prop::collection::vec(prop_oneof![0u32..345, Just(u32::MAX)], 0..60),
        skip_special: bool,
    ) {
        for model in ["qwen2_vl", "llama3", "llama2"] {
            let tokenizer = tokenizer(model);
            let prompt: Vec<TokenId> = prompt.iter().copied().map(TokenId).collect();
            let mut ours = Detokenizer::new(tokenizer.clone(), &prompt, skip_special);
            let mut stream = primed(&tokenizer, &prompt, skip_special);
            for token in answer.iter().copied().map(TokenId) {
                let expected = match stream.step(token) {
                    Ok(text) => text.unwrap_or_default(),
                    Err(_) => break,
                };
                prop_assert_eq!(ours.push(token), expected);
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
        in_pieces(&tokenizer, &ids(&prompt), &ids(&answer), skip_special);
    }
}
