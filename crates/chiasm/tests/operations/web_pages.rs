//! Pages of web sites that ask, and proxies that serve this server below a path.

use reqwest::Method;
use serde_json::json;

use super::serve;
use crate::support::{Answer, Server};

const PAGE: &str = "https://chat.example";
const KEY: &str = "Bearer secret";

/// Asks as a browser does for a page of this origin.
async fn ask(server: &Server, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let method = Method::from_bytes(method.as_bytes()).expect("a method");
    let request = server.client.request(method, format!("{}{path}", server.url));
    let request = request.body(json!({"prompt": "hello", "max_tokens": 1}).to_string());
    let request =
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    Answer::of(request.send().await.expect("an answer")).await
}

fn allowed(answer: &Answer) -> Option<&str> {
    let origin = answer.headers.get("access-control-allow-origin");
    origin.map(|origin| origin.to_str().expect("text"))
}

#[tokio::test]
async fn pages_of_named_sites_may_ask_and_read_errors_too() {
    let sites = format!("[\"{PAGE}\"]");
    let server = serve(&["--api-key", "secret", "--allowed-origins", &sites]).await;
    let path = "/v1/completions";
    let post = ("access-control-request-method", "POST");
    let wants = ("access-control-request-headers", "authorization,content-type");
    let told = ask(&server, "OPTIONS", path, &[("origin", PAGE), post, wants]).await;
    assert_eq!(
        (told.status, allowed(&told), told.text.as_str()),
        (200, Some(PAGE), ""),
        "without a key"
    );
    assert_eq!(told.header("access-control-allow-headers"), wants.1);
    assert!(told.header("access-control-allow-methods").contains("POST"));
    assert!(told.headers.get("access-control-allow-credentials").is_none());

    let (key, kind) = (("authorization", KEY), ("content-type", "application/json"));
    let answer = ask(&server, "POST", path, &[("origin", PAGE), key, kind]).await;
    assert_eq!((answer.status, allowed(&answer)), (200, Some(PAGE)));
    assert!(answer.headers.get_all("vary").iter().any(|vary| vary == "origin"));
    for (method, path, headers, status) in [
        ("POST", path, &[("origin", PAGE), kind][..], 401),
        ("POST", path, &[("origin", PAGE), key], 415),
        ("GET", path, &[("origin", PAGE), key], 405),
        ("GET", "/nowhere", &[("origin", PAGE), key], 404),
        ("OPTIONS", path, &[("origin", PAGE)], 401),
    ] {
        let refused = ask(&server, method, path, headers).await;
        assert_eq!(
            (refused.status, allowed(&refused)),
            (status, Some(PAGE)),
            "{method} {path}: {}",
            refused.text
        );
    }
    // Another site's page learns nothing.
    let other = ("origin", "https://other.example");
    let refused = ask(&server, "OPTIONS", path, &[other, post, wants]).await;
    assert_eq!((refused.refused(400).as_str(), allowed(&refused)), ("origin", None));
    assert_eq!(allowed(&ask(&server, "POST", path, &[other, key, kind]).await), None);
}

#[tokio::test]
async fn no_page_may_ask_where_no_site_is_named() {
    let server = serve(&[]).await;
    let post = ("access-control-request-method", "POST");
    let refused = ask(&server, "OPTIONS", "/v1/completions", &[("origin", PAGE), post]).await;
    assert_eq!((refused.status, allowed(&refused)), (405, None));
    let answer = ask(&server, "GET", "/v1/models", &[("origin", PAGE)]).await;
    assert_eq!((answer.status, allowed(&answer)), (200, None));
    assert!(answer.headers.get("vary").is_none());
}

#[tokio::test]
async fn requests_come_with_the_root_path_and_without() {
    let server = serve(&["--root-path", "/models/m/", "--api-key", "secret"]).await;
    let (key, kind) = (("authorization", KEY), ("content-type", "application/json"));
    for root in ["", "/models/m"] {
        let answer = ask(&server, "POST", &format!("{root}/v1/completions"), &[key, kind]).await;
        assert_eq!(answer.ok()["object"], "text_completion");
        assert_eq!(
            ask(&server, "GET", &format!("{root}/v1/models/m?x=y"), &[key]).await.ok()["id"],
            "m"
        );
        for (path, status) in [("/health", 200), ("/v1/models", 401), ("/nowhere", 401)] {
            assert_eq!(
                ask(&server, "GET", &format!("{root}{path}"), &[]).await.status,
                status,
                "{root}{path}"
            );
        }
    }
    assert_eq!(ask(&server, "GET", "/models/m2/v1/models", &[key]).await.status, 404);
    assert_eq!(ask(&server, "GET", "/models/m/models/m/v1/models", &[key]).await.status, 404);
    assert_eq!(
        server.metric("chiasm_requests_total{endpoint=\"completions\",status=\"200\"}").await,
        2.0
    );
}
