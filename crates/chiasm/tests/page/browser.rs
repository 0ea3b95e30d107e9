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

/// The deadline for the browser's answer to a command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// A browser with one page. Killed when dropped.
pub(crate) struct Browser {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    session: String,
    /// The id of the last command.
    last_id: u64,
    /// Events that no caller has read yet.
    events: VecDeque<Value>,
    _profile: TempDir,
}

impl Browser {
    /// Starts the browser in `CHIASM_TEST_CHROMIUM`.
    pub(crate) fn start() -> Self {
        let program = std::env::var("CHIASM_TEST_CHROMIUM")
            .expect("CHIASM_TEST_CHROMIUM must be set: `cargo xtask test` does so");
        let profile = tempfile::tempdir().expect("a folder");
        let folder = format!("--user-data-dir={}", profile.path().display());
        // Chromium reads commands from descriptor 3 and writes messages to descriptor 4. The shell
        // connects them to this process's pipes.
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
        let input = child.stdin.take().expect("a pipe");
        let output = child.stdout.take().expect("a pipe");
        let (sender, messages) = channel();
        thread::spawn(move || {
            let messages = BufReader::new(output).split(0).map_while(Result::ok);
            for message in messages.filter_map(|message| serde_json::from_slice(&message).ok()) {
                if sender.send(message).is_err() {
                    break;
                }
            }
        });
        let mut browser = Self {
            child,
            input,
            messages,
            session: String::new(),
            last_id: 0,
            events: VecDeque::new(),
            _profile: profile,
        };
        let target =
            browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached =
            browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = attached["sessionId"].as_str().expect("a session").to_owned();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}));
        }
        browser
    }

    /// Navigates to `url`.
    pub(crate) fn open(&mut self, url: &str) {
        let answer = self.call("Page.navigate", json!({"url": url}));
        assert!(answer["errorText"].is_null(), "{url}: {answer}");
    }

    /// Runs a script and returns its value. Promises are awaited.
    pub(crate) fn evaluate(&mut self, script: &str) -> Value {
        self.try_evaluate(script).unwrap_or_else(|error| panic!("{script}: {error}"))
    }

    /// Like [`evaluate`](Self::evaluate), but returns the browser's error if it could not run the
    /// script.
    fn try_evaluate(&mut self, script: &str) -> Result<Value, Value> {
        let arguments = json!({"expression": script, "awaitPromise": true, "returnByValue": true});
        let answer = self.try_call("Runtime.evaluate", arguments)?;
        assert!(answer["exceptionDetails"].is_null(), "{script}: {answer}");
        Ok(answer["result"]["value"].clone())
    }

    /// Waits until a script returns a truthy value, and returns the time that took.
    ///
    /// Navigation ends a page's scripts. That counts as not yet true.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, script: &str, timeout: Duration) -> Duration {
        let started = Instant::now();
        while self.try_evaluate(&format!("Boolean({script})")) != Ok(Value::Bool(true)) {
            let body = "document.body?.innerText.slice(0, 2000)";
            assert!(
                started.elapsed() < timeout,
                "not within {timeout:?}: {script}\n{}",
                self.evaluate(body)
            );
            thread::sleep(Duration::from_millis(20));
        }
        started.elapsed()
    }

    /// Sets the preferred color scheme, `light` or `dark`.
    pub(crate) fn set_color_scheme(&mut self, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
    }

    /// Presses and releases a key.
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
            let event = json!({
                "type": kind,
                "key": key,
                "code": key,
                "windowsVirtualKeyCode": code,
                "text": text,
            });
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Saves a screenshot for people to look at.
    pub(crate) fn save_screenshot(&mut self, name: &str) {
        let shot = self.call("Page.captureScreenshot", json!({"format": "png"}));
        let bytes = STANDARD.decode(shot["data"].as_str().expect("data")).expect("base64");
        let path = screenshots_folder().join(format!("{name}.png"));
        std::fs::write(&path, bytes).expect("the screenshot is written");
        println!("screenshot: {}", path.display());
    }

    /// Returns the page's errors since the last call: exceptions, console errors and errors logged
    /// by the browser.
    pub(crate) fn take_errors(&mut self) -> Vec<Value> {
        self.evaluate("1");
        let is_error = |event: &Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => event["params"]["type"] == "error",
            Some("Log.entryAdded") => event["params"]["entry"]["level"] == "error",
            _ => false,
        };
        self.events.drain(..).filter(is_error).collect()
    }

    /// Returns the CPU seconds of the page's main thread so far. Only the difference between two
    /// calls means something. Other processes that take the cores do not change it.
    pub(crate) fn main_thread_cpu(&mut self) -> f64 {
        self.call("Performance.enable", json!({"timeDomain": "threadTicks"}));
        let answer = self.call("Performance.getMetrics", json!({}));
        let metrics = answer["metrics"].as_array().expect("metrics");
        let tasks = metrics.iter().find(|metric| metric["name"] == "TaskDuration");
        tasks.expect("the time of tasks")["value"].as_f64().expect("seconds")
    }

    /// Calls a method of the protocol, which must succeed.
    fn call(&mut self, method: &str, params: Value) -> Value {
        self.try_call(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// Calls a method of the protocol. Returns its result or the protocol's error.
    fn try_call(&mut self, method: &str, params: Value) -> Result<Value, Value> {
        self.last_id += 1;
        let mut message = json!({"id": self.last_id, "method": method, "params": params});
        if !self.session.is_empty() {
            message["sessionId"] = self.session.as_str().into();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.input.write_all(&bytes).expect("an open pipe");
        loop {
            let answer = self
                .messages
                .recv_timeout(COMMAND_TIMEOUT)
                .unwrap_or_else(|error| panic!("{method}: {error}"));
            if answer["id"] == self.last_id {
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

/// Returns the folder of the screenshots, which it creates if needed.
fn screenshots_folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}
