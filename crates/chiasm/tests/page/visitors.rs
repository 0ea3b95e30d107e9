//! Access to the page, over HTTP without a browser.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::redirect::Policy;
use serde_json::{Value, json};

use super::{TIMEOUT, serve};
use crate::support::{Answer, Server, wait_for};

struct Visitor(reqwest::Client);

impl Visitor {
    fn new() -> Self {
        chiasm::install_crypto_provider();
        let client = reqwest::Client::builder().no_proxy().redirect(Policy::none());
        Self(client.timeout(Duration::from_secs(20)).build().expect("a client"))
    }

    async fn get(&self, server: &Server, path: &str, headers: &[(&str, &str)]) -> Answer {
        let request = self.0.get(format!("{}{path}", server.url));
        let request =
            headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        Answer::read(request.send().await.expect("an answer")).await
    }

    async fn log_in(&self, server: &Server, form: String) -> Answer {
        let request = self.0.post(format!("{}/ui/login", server.url)).body(form);
        Answer::read(request.send().await.expect("an answer")).await
    }

    /// Opens the stream of events and reads its head only.
    async fn open_events(&self, server: &Server) -> reqwest::Response {
        self.0.get(format!("{}/ui/events", server.url)).send().await.expect("an answer")
    }
}

#[tokio::test]
async fn page_needs_a_session_or_a_key() {
    let server = serve(1, &["--api-key", "secret", "--api-key", "other"]).await;
    let visitor = Visitor::new();
    for path in ["/ui/events", "/ui/requests/0", "/ui/session"] {
        assert_eq!(visitor.get(&server, path, &[]).await.status, 401, "{path}");
        assert_eq!(
            visitor.get(&server, path, &[("cookie", "chiasm_ui=99999999999.00")]).await.status,
            401,
            "{path}"
        );
    }
    let form = visitor.get(&server, "/ui/", &[]).await;
    assert_eq!(form.status, 401);
    assert!(
        form.text.contains("<form method=\"post\" action=\"login\">")
            && !form.text.contains("role=\"alert\"")
    );
    assert!(
        form.headers.get("www-authenticate").is_none(),
        "the browser's own login dialog would hide the form"
    );

    for wrong in ["key=wrong", "key=", "", "other=secret", "key=%FF"] {
        let refused = visitor.log_in(&server, wrong.to_owned()).await;
        assert_eq!(refused.status, 401, "{wrong}");
        assert!(
            refused.text.contains("role=\"alert\"") && refused.headers.get("set-cookie").is_none(),
            "{wrong}"
        );
    }
    assert_eq!(visitor.log_in(&server, format!("key={}", "a".repeat(9000))).await.status, 413);
    let accepted = visitor.log_in(&server, "key=other".to_owned()).await;
    assert_eq!((accepted.status, accepted.header("location").as_str()), (303, "./"));
    let cookie = accepted.header("set-cookie");
    assert!(
        cookie.contains("HttpOnly")
            && cookie.contains("SameSite=Strict")
            && !cookie.contains("other"),
        "{cookie}"
    );
    let cookie = cookie.split(';').next().expect("a cookie");
    let page = visitor.get(&server, "/ui/", &[("cookie", cookie)]).await;
    assert!(page.status == 200 && page.text.contains("page.js"));
    assert_eq!(visitor.get(&server, "/ui/session", &[("cookie", cookie)]).await.status, 204);
    assert_eq!(
        visitor.get(&server, "/ui/session", &[("authorization", "Bearer secret")]).await.status,
        204
    );
    assert_eq!(
        visitor.get(&server, "/workers", &[("cookie", cookie)]).await.status,
        401,
        "a session gives access to the page only"
    );
}

#[tokio::test]
async fn logout_ends_the_session() {
    let server = serve(1, &["--api-key", "secret"]).await;
    let visitor = Visitor::new();
    let cookie = visitor.log_in(&server, "key=secret".to_owned()).await.header("set-cookie");
    let cookie = cookie.split(';').next().expect("a cookie");
    let events = visitor.0.get(format!("{}/ui/events", server.url)).header("cookie", cookie);
    let events = events.send().await.expect("an answer");
    assert_eq!(events.status(), 200);
    let logout = visitor.0.post(format!("{}/ui/logout", server.url)).header("cookie", cookie);
    let logout = Answer::read(logout.send().await.expect("an answer")).await;
    assert_eq!(logout.status, 303);
    assert!(logout.header("set-cookie").contains("Max-Age=0"));
    // A copy of the cookie is no longer valid.
    assert_eq!(visitor.get(&server, "/ui/session", &[("cookie", cookie)]).await.status, 401);
    let text =
        tokio::time::timeout(TIMEOUT, events.text()).await.expect("the events end").expect("text");
    assert!(text.starts_with("event: start"), "{text}");
}

#[tokio::test]
async fn finished_requests_are_not_shown_as_running() {
    let server = serve(2, &[]).await;
    let list = json!({"prompt": ["one", "two", "three"], "max_tokens": 2, "ignore_eos": true});
    server.post("/v1/completions", &list).await.ok();
    let mut streamed = list.clone();
    streamed["stream"] = true.into();
    server.post("/v1/completions", &streamed).await.chunks();
    // Not every prompt of a burst gets an explanation.
    let requests = async || {
        let mut events = Visitor::new().open_events(&server).await;
        let start = events.chunk().await.expect("a chunk").expect("a start");
        let start =
            std::str::from_utf8(&start).expect("UTF-8").trim().strip_prefix("event: start\ndata: ");
        let start: Value = serde_json::from_str(start.expect("a start")).expect("JSON");
        start["requests"].as_array().expect("a list").clone()
    };
    let has_ended = |request: &Value| {
        request["outcome"]["status"] == 200 && request["outcome"]["found"]["completion_tokens"] == 2
    };
    let all_ended = async || {
        let requests = requests().await;
        requests.len() >= 2 && requests.iter().all(has_ended)
    };
    wait_for("an end of each", TIMEOUT, all_ended).await;
}

#[tokio::test]
async fn page_forbids_framing_by_other_sites() {
    let server = serve(1, &["--root-path", "/models/m"]).await;
    let visitor = Visitor::new();
    let redirect = visitor.get(&server, "/models/m/ui", &[]).await;
    let location = redirect.header("location");
    assert_eq!((redirect.status, location.as_str()), (303, "ui/"), "relative to any prefix");
    for path in ["/ui/", "/ui/page.js", "/ui/page.css", "/ui/icon.svg", "/models/m/ui/fleet.js"] {
        let answer = visitor.get(&server, path, &[]).await;
        assert_eq!(answer.status, 200, "{path}");
        let policy = answer.header("content-security-policy");
        assert!(
            policy.starts_with("default-src 'none'") && policy.contains("frame-ancestors 'none'"),
            "{policy}"
        );
        assert!(!policy.contains("unsafe") && answer.header("x-content-type-options") == "nosniff");
        // A namespace is a name that browsers don't fetch.
        let text = answer.text.replace("http://www.w3.org/2000/svg", "");
        assert!(
            !text.contains("http://") && !text.contains("https://"),
            "{path} refers to other hosts"
        );
        assert!(!text.contains(" style=") && !text.contains("innerHTML"), "{path}");
    }
    for path in ["/ui/none.js", "/ui/requests/0", "/ui/requests/x", "/ui/%FF", "/uix"] {
        assert_eq!(visitor.get(&server, path, &[]).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn disabled_page_is_not_found() {
    let server = serve(1, &["--ui=off"]).await;
    for path in ["/ui", "/ui/", "/ui/events"] {
        assert_eq!(Visitor::new().get(&server, path, &[]).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn open_pages_are_limited_but_do_not_delay_shutdown() {
    let server = serve(1, &[]).await;
    let visitor = Visitor::new();
    let mut open = Vec::new();
    for _ in 0..16 {
        open.push(visitor.open_events(&server).await);
    }
    assert!(open.iter().all(|page| page.status() == 200));
    assert_eq!(visitor.open_events(&server).await.status(), 503);
    open.truncate(1);
    let deadline = Instant::now() + Duration::from_secs(10);
    while visitor.open_events(&server).await.status() != 200 {
        assert!(Instant::now() < deadline, "pages that were closed still count");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(server.terminate(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn events_contain_no_urls_or_texts_of_requests() {
    let server = serve(2, &[]).await;
    let pixels = image();
    let body = json!({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": pixels}},
        {"type": "text", "text": "Unmistakable words"}]}], "max_tokens": 3});
    let mut events = Visitor::new().open_events(&server).await;
    let mut text = String::new();
    for _ in 0..3 {
        server.chat(&body).await.ok();
    }
    while !text.contains("\"completion_tokens\":3") || text.matches("event: tick").count() < 3 {
        let chunk = events.chunk().await.expect("a chunk").expect("more events");
        text.push_str(std::str::from_utf8(&chunk).expect("UTF-8"));
    }
    let explanation = Visitor::new().get(&server, "/ui/requests/0", &[]).await.ok();
    assert_eq!(explanation["candidates"].as_array().expect("candidates").len(), 2);
    assert_eq!(explanation["plans"][0]["items"][0]["modality"], "image");
    let all = format!("{text}{explanation}");
    assert!(
        !all.contains("Unmistakable") && !all.contains("base64") && !all.contains("data:image"),
        "{all}"
    );
}

/// Returns a picture as a data URL.
pub(crate) fn image() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/images/dawn.jpg");
    let bytes = std::fs::read(path).expect("a picture");
    format!("data:image/jpeg;base64,{}", STANDARD.encode(bytes))
}
