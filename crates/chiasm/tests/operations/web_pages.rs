//! CORS requests from web pages, and proxies that serve this server below a path.

use reqwest::Method;
use serde_json::json;

use super::serve;
use crate::support::{Answer, Server};

const PAGE: &str = "https://chat.example";
const KEY: &str = "Bearer secret";

/// Sends a request with these headers.
async fn send(server: &Server, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let method = Method::from_bytes(method.as_bytes()).expect("a method");
    let request = server.client.request(method, format!("{}{path}", server.url));
    let request = request.body(json!({"prompt": "hello", "max_tokens": 1}).to_string());
    let request =
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    Answer::read(request.send().await.expect("an answer")).await
}

/// Returns the value of `access-control-allow-origin`.
fn allowed_origin(answer: &Answer) -> Option<&str> {
    let origin = answer.headers.get("access-control-allow-origin");
    origin.map(|origin| origin.to_str().expect("text"))
}

#[tokio::test]
async fn allowed_origin_may_read_errors() {
    let sites = format!("[\"{PAGE}\"]");
    let server = serve(&["--api-key", "secret", "--allowed-origins", &sites]).await;
    let path = "/v1/completions";
    let post = ("access-control-request-method", "POST");
    let requested = ("access-control-request-headers", "authorization,content-type");
    let preflight = send(&server, "OPTIONS", path, &[("origin", PAGE), post, requested]).await;
    assert_eq!(
        (preflight.status, allowed_origin(&preflight), preflight.text.as_str()),
        (200, Some(PAGE), ""),
        "without a key"
    );
    assert_eq!(preflight.header("access-control-allow-headers"), requested.1);
    assert!(preflight.header("access-control-allow-methods").contains("POST"));
    assert!(preflight.headers.get("access-control-allow-credentials").is_none());

    let key = ("authorization", KEY);
    let kind = ("content-type", "application/json");
    let answer = send(&server, "POST", path, &[("origin", PAGE), key, kind]).await;
    assert_eq!((answer.status, allowed_origin(&answer)), (200, Some(PAGE)));
    assert!(answer.headers.get_all("vary").iter().any(|vary| vary == "origin"));
    for (method, path, headers, status) in [
        ("POST", path, &[("origin", PAGE), kind][..], 401),
        ("POST", path, &[("origin", PAGE), key], 415),
        ("GET", path, &[("origin", PAGE), key], 405),
        ("GET", "/nowhere", &[("origin", PAGE), key], 404),
        ("OPTIONS", path, &[("origin", PAGE)], 401),
    ] {
        let refused = send(&server, method, path, headers).await;
        assert_eq!(
            (refused.status, allowed_origin(&refused)),
            (status, Some(PAGE)),
            "{method} {path}: {}",
            refused.text
        );
    }
    // Pages of other origins can read nothing.
    let other = ("origin", "https://other.example");
    let refused = send(&server, "OPTIONS", path, &[other, post, requested]).await;
    assert_eq!((refused.refused(400).as_str(), allowed_origin(&refused)), ("origin", None));
    assert_eq!(allowed_origin(&send(&server, "POST", path, &[other, key, kind]).await), None);
}

#[tokio::test]
async fn cors_is_off_without_allowed_origins() {
    let server = serve(&[]).await;
    let post = ("access-control-request-method", "POST");
    let refused = send(&server, "OPTIONS", "/v1/completions", &[("origin", PAGE), post]).await;
    assert_eq!((refused.status, allowed_origin(&refused)), (405, None));
    let answer = send(&server, "GET", "/v1/models", &[("origin", PAGE)]).await;
    assert_eq!((answer.status, allowed_origin(&answer)), (200, None));
    assert!(answer.headers.get("vary").is_none());
}

#[tokio::test]
async fn root_path_is_optional_in_requests() {
    let server = serve(&["--root-path", "/models/m/", "--api-key", "secret"]).await;
    let key = ("authorization", KEY);
    let kind = ("content-type", "application/json");
    for root in ["", "/models/m"] {
        let answer = send(&server, "POST", &format!("{root}/v1/completions"), &[key, kind]).await;
        assert_eq!(answer.ok()["object"], "text_completion");
        assert_eq!(
            send(&server, "GET", &format!("{root}/v1/models/m?x=y"), &[key]).await.ok()["id"],
            "m"
        );
        for (path, status) in [("/health", 200), ("/v1/models", 401), ("/nowhere", 401)] {
            assert_eq!(
                send(&server, "GET", &format!("{root}{path}"), &[]).await.status,
                status,
                "{root}{path}"
            );
        }
    }
    assert_eq!(send(&server, "GET", "/models/m2/v1/models", &[key]).await.status, 404);
    assert_eq!(send(&server, "GET", "/models/m/models/m/v1/models", &[key]).await.status, 404);
    assert_eq!(
        server.metric("chiasm_requests_total{endpoint=\"completions\",status=\"200\"}").await,
        2.0
    );
}
