//! Settings of the image processor for all requests: what `--mm-processor-kwargs` makes of prompts.

use std::time::Duration;

use crate::support::{Server, chiasm, demo_model};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::DAWN;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
/// The demo's model makes 80 tokens of an image of 280x224, and 20 within this area.
const FEW_PIXELS: &str = r#"{"max_pixels": 16000}"#;

/// The arguments of a server before one simulated engine, `extra` among them and `flags` after the
/// two dashes.
fn arguments<'a>(model: &'a str, extra: &[&'a str], flags: &[&'a str]) -> Vec<&'a str> {
    let own = ["--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000", "--port", "0"];
    [&[model], &own[..], extra, &["--"], flags].concat()
}

async fn serve(extra: &[&str], flags: &[&str]) -> Server {
    let server = Server::start(&arguments(&demo_model().display().to_string(), extra, flags));
    server.wait_ready(1, SOON).await;
    server
}

/// What the engine says that it saw, and how many tokens of the prompt it held.
async fn picture(server: &Server, kwargs: Value) -> (String, u64) {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(DAWN.jpeg));
    let content = json!([{"type": "image_url", "image_url": {"url": url}}]);
    let messages = json!([{"role": "user", "content": content}]);
    let body = json!({"model": "m", "max_tokens": 64, "messages": messages, "mm_processor_kwargs": kwargs});
    let answer = server.chat(&body).await.ok();
    let text = answer["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
    (text, answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count"))
}

#[tokio::test]
async fn flags_of_vllm_change_every_prompt_as_they_would_there() {
    for flags in [
        &["--mm-processor-kwargs", FEW_PIXELS][..],
        &["--mm_processor_kwargs.max_pixels", "16000"],
        &["--enforce-eager", r#"--mm-processor-kwargs={"max_pixels": 16000}"#],
    ] {
        let server = serve(&[], flags).await;
        let (text, _) = picture(&server, json!({})).await;
        assert!(text.contains("(20 tokens"), "{flags:?}: {text}");
    }
}

#[tokio::test]
async fn a_request_wins_and_what_it_asks_for_anyway_is_the_same_image() {
    let server = serve(&["--mm-processor-kwargs", FEW_PIXELS], &[]).await;
    let (text, _) = picture(&server, json!({})).await;
    assert!(text.contains("(20 tokens"), "{text}");
    let (text, same) = picture(&server, json!({"max_pixels": 16000})).await;
    assert!(text.contains("(20 tokens"), "{text}");
    // Only what stands before the image is held of this one.
    let (text, other) = picture(&server, json!({"max_pixels": 1003520})).await;
    assert!(text.contains("(80 tokens") && other < same, "{text} {other} {same}");
}

#[test]
fn what_cannot_be_honoured_ends_the_start_by_name() {
    let model = demo_model().display().to_string();
    for (extra, flags, expected) in [
        (
            &[][..],
            &["--mm-processor-kwargs", r#"{"fps": 2}"#][..],
            "--mm-processor-kwargs: mm_processor_kwargs.fps is",
        ),
        (
            &[],
            &["--mm-processor-kwargs.max_pixels", "1k"],
            "mm_processor_kwargs.max_pixels must be an integer",
        ),
        (
            &["--mm-processor-kwargs", r#"{"min_pixels": 0}"#],
            &[],
            "mm_processor_kwargs.min_pixels must be",
        ),
        (
            &["--mm-processor-kwargs", FEW_PIXELS],
            &["--mm-processor-kwargs", FEW_PIXELS],
            "before and after --",
        ),
        (&["--mm-processor-kwargs", "7"], &[], "expected a JSON object"),
        (
            &[],
            &["--media-io-kwargs", r#"{"image": {"rgba_background_color": [0, 0, 0]}}"#],
            "--media-io-kwargs after --",
        ),
        (&[], &["--config", "/does/not/exist.yaml"], "/does/not/exist.yaml"),
    ] {
        let output =
            chiasm(&["serve"]).args(arguments(&model, extra, flags)).output().expect("it runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains(expected),
            "{extra:?} {flags:?}: {error}"
        );
    }
}
