//! Who may see the page, without a browser.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::redirect::Policy;
use serde_json::{Value, json};

use super::{SOON, serve};
use crate::support::{Answer, Server, wait_for};

struct Visitor(reqwest::Client);

impl Visitor {
    fn new() -> Self {
        chiasm::use_ring();
        let client = reqwest::Client::builder().no_proxy().redirect(Policy::none());
        Self(client.timeout(Duration::from_secs(20)).build().expect("a client"))
    }

    async fn get(&self, server: &Server, path: &str, headers: &[(&str, &str)]) -> Answer {
        let request = self.0.get(format!("{}{path}", server.url));
        let request =
            headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        Answer::of(request.send().await.expect("an answer")).await
    }

    async fn log_in(&self, server: &Server, form: String) -> Answer {
        let request = self.0.post(format!("{}/ui/login", server.url)).body(form);
        Answer::of(request.send().await.expect("an answer")).await
    }

    /// Opens a stream of events, which is read no further than its head.
    async fn follow(&self, server: &Server) -> reqwest::Response {
        self.0.get(format!("{}/ui/events", server.url)).send().await.expect("an answer")
    }
}

#[tokio::test]
async fn with_keys_only_a_session_or_a_key_shows_it() {
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
        "the browser's own question would hide the form"
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
    let taken = visitor.log_in(&server, "key=other".to_owned()).await;
    assert_eq!((taken.status, taken.header("location").as_str()), (303, "./"));
    let cookie = taken.header("set-cookie");
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
        "it opens nothing else"
    );
}

#[tokio::test]
async fn logout_ends_the_session_and_its_events() {
    let server = serve(1, &["--api-key", "secret"]).await;
    let visitor = Visitor::new();
    let taken = visitor.log_in(&server, "key=secret".to_owned()).await.header("set-cookie");
    let cookie = taken.split(';').next().expect("a cookie");
    let events = visitor.0.get(format!("{}/ui/events", server.url)).header("cookie", cookie);
    let events = events.send().await.expect("an answer");
    assert_eq!(events.status(), 200);
    let logout = visitor.0.post(format!("{}/ui/logout", server.url)).header("cookie", cookie);
    let logout = Answer::of(logout.send().await.expect("an answer")).await;
    assert_eq!(logout.status, 303);
    assert!(logout.header("set-cookie").contains("Max-Age=0"));
    // Whoever has kept the cookie has nothing of it.
    assert_eq!(visitor.get(&server, "/ui/session", &[("cookie", cookie)]).await.status, 401);
    let told =
        tokio::time::timeout(SOON, events.text()).await.expect("the events end").expect("text");
    assert!(told.starts_with("event: start"), "{told}");
}

#[tokio::test]
async fn requests_that_have_ended_are_not_shown_as_running() {
    let server = serve(2, &[]).await;
    let list = json!({"prompt": ["one", "two", "three"], "max_tokens": 2, "ignore_eos": true});
    server.post("/v1/completions", &list).await.ok();
    let mut streamed = list.clone();
    streamed["stream"] = true.into();
    server.post("/v1/completions", &streamed).await.chunks();
    // Of prompts that are routed in one moment not all are explained.
    let requests = async || {
        let mut events = Visitor::new().follow(&server).await;
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
    wait_for("an end of each", SOON, all_ended).await;
}

#[tokio::test]
async fn nothing_of_it_may_be_framed_or_bring_in_what_is_not_its_own() {
    let server = serve(1, &["--root-path", "/models/m"]).await;
    let visitor = Visitor::new();
    let moved = visitor.get(&server, "/models/m/ui", &[]).await;
    assert_eq!((moved.status, moved.header("location").as_str()), (303, "ui/"), "below any prefix");
    for path in ["/ui/", "/ui/page.js", "/ui/page.css", "/ui/icon.svg", "/models/m/ui/fleet.js"] {
        let answer = visitor.get(&server, path, &[]).await;
        assert_eq!(answer.status, 200, "{path}");
        let policy = answer.header("content-security-policy");
        assert!(
            policy.starts_with("default-src 'none'") && policy.contains("frame-ancestors 'none'"),
            "{policy}"
        );
        assert!(!policy.contains("unsafe") && answer.header("x-content-type-options") == "nosniff");
        // A namespace is a name and no address that is asked.
        let text = answer.text.replace("http://www.w3.org/2000/svg", "");
        assert!(
            !text.contains("http://") && !text.contains("https://"),
            "{path} asks somebody else"
        );
        assert!(!text.contains(" style=") && !text.contains("innerHTML"), "{path}");
    }
    for path in ["/ui/none.js", "/ui/requests/0", "/ui/requests/x", "/ui/%FF", "/uix"] {
        assert_eq!(visitor.get(&server, path, &[]).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn it_can_be_switched_off_and_then_is_not_there() {
    let server = serve(1, &["--ui=off"]).await;
    for path in ["/ui", "/ui/", "/ui/events"] {
        assert_eq!(Visitor::new().get(&server, path, &[]).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn a_few_pages_are_told_and_an_open_one_does_not_hold_up_the_end() {
    let server = serve(1, &[]).await;
    let visitor = Visitor::new();
    let mut open = Vec::new();
    for _ in 0..16 {
        open.push(visitor.follow(&server).await);
    }
    assert!(open.iter().all(|page| page.status() == 200));
    assert_eq!(visitor.follow(&server).await.status(), 503);
    open.truncate(1);
    let deadline = Instant::now() + Duration::from_secs(10);
    while visitor.follow(&server).await.status() != 200 {
        assert!(Instant::now() < deadline, "pages that were closed still count");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(server.terminate(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn what_is_told_grows_with_each_request_and_names_no_url_or_text() {
    let server = serve(2, &[]).await;
    let pixels = image();
    let body = json!({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": pixels}},
        {"type": "text", "text": "Unmistakable words"}]}], "max_tokens": 3});
    let mut events = Visitor::new().follow(&server).await;
    let mut told = String::new();
    for _ in 0..3 {
        server.chat(&body).await.ok();
    }
    while !told.contains("\"completion_tokens\":3") || told.matches("event: tick").count() < 3 {
        told.push_str(
            std::str::from_utf8(&events.chunk().await.expect("a chunk").expect("more"))
                .expect("UTF-8"),
        );
    }
    let why = Visitor::new().get(&server, "/ui/requests/0", &[]).await.ok();
    assert_eq!(why["candidates"].as_array().expect("candidates").len(), 2);
    assert_eq!(why["plans"][0]["items"][0]["modality"], "image");
    let all = format!("{told}{why}");
    assert!(
        !all.contains("Unmistakable") && !all.contains("base64") && !all.contains("data:image"),
        "{all}"
    );
}

/// A picture as a data URL.
pub(crate) fn image() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/images/dawn.jpg");
    let bytes = std::fs::read(path).expect("a picture");
    format!("data:image/jpeg;base64,{}", STANDARD.encode(bytes))
}
