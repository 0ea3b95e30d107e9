//! A headless Chromium, driven by its DevTools protocol over pipes.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Until the browser has done what it was told.
const PATIENCE: Duration = Duration::from_secs(30);

/// A browser with one page. Ended when dropped.
pub(crate) struct Browser {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    session: String,
    next: u64,
    /// What the page said that nobody has asked for yet.
    events: VecDeque<Value>,
    _profile: TempDir,
}

impl Browser {
    /// Starts the browser that `CHIASM_TEST_CHROMIUM` names.
    pub(crate) fn start() -> Self {
        let program = std::env::var("CHIASM_TEST_CHROMIUM")
            .expect("CHIASM_TEST_CHROMIUM, which cargo xtask test sets");
        let profile = tempfile::tempdir().expect("a folder");
        let folder = format!("--user-data-dir={}", profile.path().display());
        // It reads its third and writes its fourth descriptor, which are pipes of ours by a shell's
        // doing.
        let flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            &folder,
        ];
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 0</dev/null 1>/dev/null", &program])
            .args(flags)
            .args(["--window-size=1400,900", "--hide-scrollbars", "about:blank"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell");
        let (to, out) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        let (sender, from) = channel();
        thread::spawn(move || {
            let messages = BufReader::new(out).split(0).map_while(Result::ok);
            for message in messages.filter_map(|message| serde_json::from_slice(&message).ok()) {
                if sender.send(message).is_err() {
                    break;
                }
            }
        });
        let mut browser = Self {
            child,
            to,
            from,
            session: String::new(),
            next: 0,
            events: VecDeque::new(),
            _profile: profile,
        };
        let target =
            browser.tell("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached =
            browser.tell("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = attached["sessionId"].as_str().expect("a session").to_owned();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.tell(domain, json!({}));
        }
        browser
    }

    /// Goes to an address.
    pub(crate) fn open(&mut self, url: &str) {
        let answer = self.tell("Page.navigate", json!({"url": url}));
        assert!(answer["errorText"].is_null(), "{url}: {answer}");
    }

    /// What a script comes to; promises are awaited.
    pub(crate) fn evaluate(&mut self, script: &str) -> Value {
        self.try_evaluate(script).unwrap_or_else(|error| panic!("{script}: {error}"))
    }

    /// Does the same as [`evaluate`](Self::evaluate), and says why if the browser ran nothing.
    fn try_evaluate(&mut self, script: &str) -> Result<Value, Value> {
        let arguments = json!({"expression": script, "awaitPromise": true, "returnByValue": true});
        let answer = self.ask("Runtime.evaluate", arguments)?;
        assert!(answer["exceptionDetails"].is_null(), "{script}: {answer}");
        Ok(answer["result"]["value"].clone())
    }

    /// Waits until a script comes to something true, and says how long that took.
    ///
    /// A page that goes to another address meanwhile ends the scripts in it, which is not yet true.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, script: &str, patience: Duration) -> Duration {
        let began = Instant::now();
        while self.try_evaluate(&format!("Boolean({script})")) != Ok(Value::Bool(true)) {
            let body = "document.body?.innerText.slice(0, 2000)";
            assert!(
                began.elapsed() < patience,
                "not within {patience:?}: {script}\n{}",
                self.evaluate(body)
            );
            thread::sleep(Duration::from_millis(20));
        }
        began.elapsed()
    }

    /// Whether the browser's user wants dark pages.
    pub(crate) fn prefer(&mut self, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.tell("Emulation.setEmulatedMedia", json!({"features": features}));
    }

    /// Presses and lets go of a key.
    pub(crate) fn press(&mut self, key: &str) {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "ArrowUp" => 38,
            "ArrowDown" => 40,
            other => panic!("no code for {other}"),
        };
        let text = if key == "Enter" { "\r" } else { "" };
        for kind in ["keyDown", "keyUp"] {
            let event = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text});
            self.tell("Input.dispatchKeyEvent", event);
        }
    }

    /// Leaves a picture of what is seen for whoever wants to look.
    pub(crate) fn picture(&mut self, name: &str) {
        let shot = self.tell("Page.captureScreenshot", json!({"format": "png"}));
        let bytes = STANDARD.decode(shot["data"].as_str().expect("data")).expect("base64");
        let path = pictures().join(format!("{name}.png"));
        std::fs::write(&path, bytes).expect("a picture is written");
        println!("a picture: {}", path.display());
    }

    /// Errors that the page has caused since this was asked: exceptions, what it wrote as errors,
    /// and what the browser did.
    pub(crate) fn errors(&mut self) -> Vec<Value> {
        self.evaluate("1");
        let is_error = |event: &Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => event["params"]["type"] == "error",
            Some("Log.entryAdded") => event["params"]["entry"]["level"] == "error",
            _ => false,
        };
        self.events.drain(..).filter(is_error).collect()
    }

    fn tell(&mut self, method: &str, params: Value) -> Value {
        self.ask(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// The browser's answer to a message: a result, or an error as the protocol has it.
    fn ask(&mut self, method: &str, params: Value) -> Result<Value, Value> {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": params});
        if !self.session.is_empty() {
            message["sessionId"] = self.session.as_str().into();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).expect("the browser reads");
        loop {
            let answer = self
                .from
                .recv_timeout(PATIENCE)
                .unwrap_or_else(|error| panic!("{method}: {error}"));
            if answer["id"] == self.next {
                return if answer["error"].is_null() {
                    Ok(answer["result"].clone())
                } else {
                    Err(answer["error"].clone())
                };
            }
            self.events.push_back(answer);
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The folder of the pictures.
fn pictures() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}
