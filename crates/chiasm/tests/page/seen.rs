//! What a browser shows of a server with simulated engines.

use std::time::Duration;

use serde_json::{Value, json};

use super::browser::Browser;
use super::visitors::image;
use super::{SOON, serve};
use crate::support::Server;

/// A name that would run if it were taken for more than a text.
const HOSTILE: &str =
    "<img src=x onerror=document.title='run'>\"'&amp;<script>document.title='run'</script>";

/// What is to be seen after something has happened has to be there by then.
const LIVE: Duration = Duration::from_secs(2);

async fn ask(server: &Server, text: &str) -> Value {
    let body = json!({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": image()}}, {"type": "text", "text": text}]}], "max_tokens": 8});
    server.chat(&body).await.ok()
}

#[tokio::test]
#[ignore = "needs Chromium"]
async fn every_view_shows_what_happens_within_two_seconds() {
    let server = serve(2, &["--served-model-name", HOSTILE]).await;
    let mut browser = Browser::start();
    browser.open(&format!("{}/ui/", server.url));
    browser.wait_for("document.querySelectorAll('.tile').length === 2", SOON);
    browser.wait_for("document.querySelector('#state').textContent === 'live'", SOON);
    assert_eq!(browser.evaluate("document.querySelector('#model').textContent"), HOSTILE);

    for number in 0..6 {
        ask(&server, &format!("Question {number}")).await;
    }
    let found = "[...document.querySelectorAll('.gauge')].some((gauge) => /found.*[1-9]\\d? %/.test(gauge.textContent))";
    browser.wait_for(found, LIVE);
    browser.picture("fleet");
    browser.evaluate(
        "{ const filter = document.querySelector('#filter'); filter.value = 'worker_1'; \
                      filter.dispatchEvent(new Event('input')); }",
    );
    browser.wait_for("document.querySelector('#shown').textContent === '1 of 2'", LIVE);

    explains_requests(&server, &mut browser).await;

    browser.evaluate("location.hash = 'media'");
    browser
        .wait_for("/that come again[^]*7/.test(document.querySelector('#media').innerText)", LIVE);
    browser.picture("media");
    // A step of the history is as long as this, and may have just begun.
    browser.evaluate("location.hash = 'time'");
    browser.wait_for(
        "[...document.querySelectorAll('#time path')].some((path) => path.getAttribute('d'))",
        SOON,
    );
    browser.evaluate("document.querySelector('#time summary').click()");
    browser
        .wait_for("/\\d ms/.test(document.querySelector('#time details table').innerText)", SOON);
    browser.picture("time");

    assert_eq!(
        browser.evaluate("document.title.includes('run')"),
        json!(true),
        "the name itself has it"
    );
    assert_ne!(browser.evaluate("document.title"), "run", "a name was run");
    assert_eq!(browser.errors(), [] as [Value; 0]);
}

async fn explains_requests(server: &Server, browser: &mut Browser) {
    browser.evaluate("location.hash = 'requests'");
    let rows = "document.querySelectorAll('#list tbody tr').length";
    browser.wait_for(&format!("{rows} === 6"), LIVE);
    ask(server, "One more").await;
    browser.wait_for(&format!("{rows} === 7"), LIVE);
    // By keys alone: to the newest request, one down, and open it.
    browser.evaluate("document.querySelector('#list tbody button').focus()");
    browser.press("ArrowDown");
    browser.press("Enter");
    browser.wait_for("document.querySelectorAll('.candidates tbody tr').length === 2", LIVE);
    let chosen = "document.querySelector('.candidates tr.chosen th').textContent";
    let worker = "document.querySelector('#list button[aria-pressed=true]').closest('tr').cells[2].textContent";
    assert_eq!(browser.evaluate(chosen), browser.evaluate(&format!("{worker} + 'chosen'")));
    // The sum that is shown is that of the terms that are shown, by the weights that are shown.
    let sums = "(() => { \
        const number = (text) => Number(text.replaceAll(',', '').replace('×', '')); \
        const weights = [...document.querySelectorAll('.candidates thead small')].map((cell) => number(cell.textContent)); \
        return [...document.querySelectorAll('.candidates tbody tr')].map((row) => { \
            const cells = [...row.cells].slice(2).map((cell) => number(cell.textContent)); \
            const cost = cells.pop(); \
            return Math.abs(cells.reduce((sum, term, at) => sum + term * weights[at], 0) - cost) / Math.max(1, cost); \
        }); })()";
    let errors = browser.evaluate(sums);
    assert!(
        errors.as_array().unwrap().iter().all(|error| error.as_f64().unwrap() < 0.02),
        "{errors}"
    );
    let held = browser
        .evaluate("document.querySelectorAll('.candidates tr.chosen rect.held.item').length");
    assert_eq!(held, 1, "the image that all ask about is held");
    browser.picture("requests");
    browser.prefer("dark");
    browser.picture("requests-dark");
    browser.prefer("light");
}

#[tokio::test]
#[ignore = "needs Chromium"]
async fn whoever_has_a_key_logs_in_by_a_form_and_out_again() {
    let mut server = serve(1, &["--api-key", "secret"]).await;
    let mut browser = Browser::start();
    browser.open(&format!("{}/ui/", server.url));
    let log_in = |browser: &mut Browser, key: &str| {
        browser.wait_for("document.querySelector('#key')", SOON);
        browser.evaluate(&format!("document.querySelector('#key').value = '{key}'"));
        browser.evaluate("document.querySelector('#key').focus()");
        browser.press("Enter");
    };
    log_in(&mut browser, "wrong");
    browser.wait_for("document.querySelector('#refused')", SOON);
    browser.picture("login");
    log_in(&mut browser, "secret");
    browser.wait_for("document.querySelectorAll('.tile').length === 1", SOON);
    assert!(!browser.evaluate("location.href").as_str().unwrap().contains("secret"));
    assert_eq!(browser.evaluate("document.cookie"), "", "scripts do not see the cookie");
    browser.evaluate("document.querySelector('#logout button').click()");
    browser.wait_for("document.querySelector('#key')", SOON);

    // The page says so when its server is gone.
    log_in(&mut browser, "secret");
    browser.wait_for("document.querySelector('#state')?.textContent === 'live'", SOON);
    server.end_by("KILL");
    browser.wait_for("document.querySelector('#state').textContent === 'not connected'", SOON);
}
