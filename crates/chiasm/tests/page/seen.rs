//! The page of a server with simulated engines, in a browser.

use std::time::Duration;

use serde_json::{Value, json};

use super::browser::Browser;
use super::visitors::image;
use super::{TIMEOUT, serve};
use crate::support::Server;

/// A model name that changes the page's title if the page treats it as HTML.
const HOSTILE_NAME: &str =
    "<img src=x onerror=document.title='run'>\"'&amp;<script>document.title='run'</script>";

/// The deadline for the page to show an event.
const LIVE: Duration = Duration::from_secs(2);

/// Sends a request with an image.
async fn chat(server: &Server, text: &str) -> Value {
    let content = json!([
        {"type": "image_url", "image_url": {"url": image()}},
        {"type": "text", "text": text},
    ]);
    let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 8});
    server.chat(&body).await.ok()
}

#[tokio::test]
#[ignore = "needs Chromium"]
async fn views_show_events_within_two_seconds() {
    let server = serve(2, &["--served-model-name", HOSTILE_NAME]).await;
    let mut browser = Browser::start();
    browser.open(&format!("{}/ui/", server.url));
    browser.wait_for("document.querySelectorAll('.tile').length === 2", TIMEOUT);
    browser.wait_for("document.querySelector('#state').textContent === 'live'", TIMEOUT);
    assert_eq!(browser.evaluate("document.querySelector('#model').textContent"), HOSTILE_NAME);

    for number in 0..6 {
        chat(&server, &format!("Question {number}")).await;
    }
    let has_hit_rate = "[...document.querySelectorAll('.gauge')]\
                        .some((gauge) => /found.*[1-9]\\d? %/.test(gauge.textContent))";
    browser.wait_for(has_hit_rate, LIVE);
    browser.save_screenshot("fleet");
    browser.evaluate(
        "{ const filter = document.querySelector('#filter'); filter.value = 'worker_1'; \
                      filter.dispatchEvent(new Event('input')); }",
    );
    browser.wait_for("document.querySelector('#shown').textContent === '1 of 2'", LIVE);

    check_explanation(&server, &mut browser).await;

    browser.evaluate("location.hash = 'media'");
    browser
        .wait_for("/that come again[^]*7/.test(document.querySelector('#media').innerText)", LIVE);
    browser.save_screenshot("media");
    // A step of the history may have just begun, and takes up to this timeout to complete.
    browser.evaluate("location.hash = 'time'");
    browser.wait_for(
        "[...document.querySelectorAll('#time path')].some((path) => path.getAttribute('d'))",
        TIMEOUT,
    );
    browser.evaluate("document.querySelector('#time summary').click()");
    browser.wait_for(
        "/\\d ms/.test(document.querySelector('#time details table').innerText)",
        TIMEOUT,
    );
    browser.save_screenshot("time");

    assert_eq!(
        browser.evaluate("document.title.includes('run')"),
        json!(true),
        "the title contains the name"
    );
    assert_ne!(browser.evaluate("document.title"), "run", "the name was treated as HTML");
    assert_eq!(browser.take_errors(), [] as [Value; 0]);
}

/// Opens the explanation of a request and checks what it shows.
async fn check_explanation(server: &Server, browser: &mut Browser) {
    browser.evaluate("location.hash = 'requests'");
    let rows = "document.querySelectorAll('#list tbody tr').length";
    browser.wait_for(&format!("{rows} === 6"), LIVE);
    chat(server, "One more").await;
    browser.wait_for(&format!("{rows} === 7"), LIVE);
    // With the keyboard alone: focus the newest request, go one down, and open it.
    browser.evaluate("document.querySelector('#list tbody button').focus()");
    browser.press("ArrowDown");
    browser.press("Enter");
    browser.wait_for("document.querySelectorAll('.candidates tbody tr').length === 2", LIVE);
    let chosen = "document.querySelector('.candidates tr.chosen th').textContent";
    let worker = "document.querySelector('#list button[aria-pressed=true]')\
                  .closest('tr').cells[2].textContent";
    assert_eq!(browser.evaluate(chosen), browser.evaluate(&format!("{worker} + 'chosen'")));
    // The displayed cost equals the sum of the displayed terms with the displayed weights.
    let relative_errors = "(() => { \
        const number = (text) => Number(text.replaceAll(',', '').replace('×', '')); \
        const weights = [...document.querySelectorAll('.candidates thead small')]\
            .map((cell) => number(cell.textContent)); \
        return [...document.querySelectorAll('.candidates tbody tr')].map((row) => { \
            const cells = [...row.cells].slice(2).map((cell) => number(cell.textContent)); \
            const cost = cells.pop(); \
            const sum = cells.reduce((sum, term, at) => sum + term * weights[at], 0); \
            return Math.abs(sum - cost) / Math.max(1, cost); \
        }); })()";
    let errors = browser.evaluate(relative_errors);
    assert!(
        errors.as_array().unwrap().iter().all(|error| error.as_f64().unwrap() < 0.02),
        "{errors}"
    );
    let held = browser
        .evaluate("document.querySelectorAll('.candidates tr.chosen rect.held.item').length");
    assert_eq!(held, 1, "the image of all requests is cached");
    browser.save_screenshot("requests");
    browser.set_color_scheme("dark");
    browser.save_screenshot("requests-dark");
    browser.set_color_scheme("light");
}

#[tokio::test]
#[ignore = "needs Chromium"]
async fn login_form_takes_a_key() {
    let mut server = serve(1, &["--api-key", "secret"]).await;
    let mut browser = Browser::start();
    browser.open(&format!("{}/ui/", server.url));
    let log_in = |browser: &mut Browser, key: &str| {
        browser.wait_for("document.querySelector('#key')", TIMEOUT);
        browser.evaluate(&format!("document.querySelector('#key').value = '{key}'"));
        browser.evaluate("document.querySelector('#key').focus()");
        browser.press("Enter");
    };
    log_in(&mut browser, "wrong");
    browser.wait_for("document.querySelector('#refused')", TIMEOUT);
    browser.save_screenshot("login");
    log_in(&mut browser, "secret");
    browser.wait_for("document.querySelectorAll('.tile').length === 1", TIMEOUT);
    assert!(!browser.evaluate("location.href").as_str().unwrap().contains("secret"));
    assert_eq!(browser.evaluate("document.cookie"), "", "scripts do not see the cookie");
    browser.evaluate("document.querySelector('#logout button').click()");
    browser.wait_for("document.querySelector('#key')", TIMEOUT);

    // The page shows that its server is gone.
    log_in(&mut browser, "secret");
    browser.wait_for("document.querySelector('#state')?.textContent === 'live'", TIMEOUT);
    server.signal_and_wait("KILL");
    browser.wait_for("document.querySelector('#state').textContent === 'not connected'", TIMEOUT);
}
