//! Settings of the image processor for all requests, by `--mm-processor-kwargs`.

use std::time::Duration;

use crate::support::{Server, chiasm, demo_model};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::DAWN;
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(20);
/// Kwargs with which the demo's model makes 20 tokens of an image of 280x224, instead of 80.
const FEW_PIXELS: &str = r#"{"max_pixels": 16000}"#;

/// Returns the arguments of a server with one simulated engine, with `flags` after `--`.
fn arguments<'a>(model: &'a str, extra: &[&'a str], flags: &[&'a str]) -> Vec<&'a str> {
    let args = ["--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000", "--port", "0"];
    [&[model], &args[..], extra, &["--"], flags].concat()
}

async fn serve(extra: &[&str], flags: &[&str]) -> Server {
    let server = Server::start(&arguments(&demo_model().display().to_string(), extra, flags));
    server.wait_ready(1, TIMEOUT).await;
    server
}

/// Sends a picture. Returns the engine's description of it, and the number of cached tokens.
async fn send_picture(server: &Server, kwargs: Value) -> (String, u64) {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(DAWN.jpeg));
    let content = json!([{"type": "image_url", "image_url": {"url": url}}]);
    let messages = json!([{"role": "user", "content": content}]);
    let body = json!({
        "model": "m",
        "max_tokens": 64,
        "messages": messages,
        "mm_processor_kwargs": kwargs,
    });
    let answer = server.chat(&body).await.ok();
    let text = answer["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
    (text, answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count"))
}

#[tokio::test]
async fn kwargs_flags_after_dashes_apply_to_all_prompts() {
    for flags in [
        &["--mm-processor-kwargs", FEW_PIXELS][..],
        &["--mm_processor_kwargs.max_pixels", "16000"],
        &["--enforce-eager", r#"--mm-processor-kwargs={"max_pixels": 16000}"#],
    ] {
        let server = serve(&[], flags).await;
        let (text, _) = send_picture(&server, json!({})).await;
        assert!(text.contains("(20 tokens"), "{flags:?}: {text}");
    }
}

#[tokio::test]
async fn request_kwargs_override_the_flag() {
    let server = serve(&["--mm-processor-kwargs", FEW_PIXELS], &[]).await;
    let (text, _) = send_picture(&server, json!({})).await;
    assert!(text.contains("(20 tokens"), "{text}");
    let (text, same) = send_picture(&server, json!({"max_pixels": 16000})).await;
    assert!(text.contains("(20 tokens"), "{text}");
    // Only the blocks before the image are cached for other kwargs.
    let (text, other) = send_picture(&server, json!({"max_pixels": 1003520})).await;
    assert!(text.contains("(80 tokens") && other < same, "{text} {other} {same}");
}

#[test]
fn unsupported_kwargs_are_refused_at_start() {
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
