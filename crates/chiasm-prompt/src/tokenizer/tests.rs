use std::path::PathBuf;

use super::*;

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models").join(name)
}

fn load(name: &str) -> Tokenizer {
    Tokenizer::from_model_dir(&model(name)).unwrap()
}

#[test]
fn token_bytes_join_to_the_text() {
    for name in ["qwen2_vl", "llama2"] {
        let tokenizer = load(name);
        let text = " the quick 北京 👩‍👩‍👧\n\u{1}é";
        let tokens = tokenizer.encode(text, false).unwrap();
        let bytes: Vec<u8> =
            tokens.iter().flat_map(|token| tokenizer.token_bytes(*token)).collect();
        let bytes = String::from_utf8(bytes).unwrap();
        // Llama 2's tokenizer puts a space before every text.
        assert!(bytes == text || bytes == format!(" {text}"), "{name}: {bytes:?}");
    }
}

#[test]
fn special_tokens_have_text_unknown_ids_have_none() {
    let tokenizer = load("qwen2_vl");
    let end = tokenizer.token_to_id("<|im_end|>").unwrap();
    assert_eq!(tokenizer.token_bytes(end), b"<|im_end|>");
    assert!(tokenizer.is_special(end));
    assert_eq!(tokenizer.eos_token(), Some(end));
    assert_eq!(tokenizer.token_bytes(TokenId(1 << 30)), b"");
    assert!(!tokenizer.is_special(TokenId(0)));
    assert_eq!(tokenizer.decode(&[end], true), "");
    assert_eq!(tokenizer.decode(&[end], false), "<|im_end|>");
}

#[test]
fn missing_tokenizer_error_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let error = Tokenizer::from_model_dir(dir.path()).unwrap_err();
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
    assert!(!error.is_request_fault());
}

#[test]
fn padding_settings_of_the_file_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(model("qwen2_vl").join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    json["truncation"] = serde_json::json!({
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
    });
    json["padding"] = serde_json::json!({
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "!"
    });
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    let tokenizer = Tokenizer::from_model_dir(dir.path()).unwrap();
    assert_eq!(
        tokenizer.encode("the quick brown fox", true).unwrap(),
        load("qwen2_vl").encode("the quick brown fox", true).unwrap()
    );
    assert_eq!(tokenizer.eos_token(), None);
}

#[test]
fn special_tokens_can_be_split_like_other_text() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(model("qwen2_vl").join("tokenizer.json"), dir.path().join("tokenizer.json"))
        .unwrap();
    let config = r#"{"split_special_tokens": true, "eos_token": {"content": "<|im_end|>"}}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    let tokenizer = Tokenizer::from_model_dir(dir.path()).unwrap();
    let end = tokenizer.eos_token().unwrap();
    assert!(!tokenizer.encode("<|im_end|>", false).unwrap().contains(&end));
}
