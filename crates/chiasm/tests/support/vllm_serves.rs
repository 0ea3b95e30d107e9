//! `vllm serve` many times over, by one process that imports vLLM once: `vllm_serves.py` tells how.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::json;

/// The process that has imported vLLM. It and all that it started end when this is dropped, or when
/// the test ends in any way.
pub struct VllmServes {
    child: Child,
    orders: Option<ChildStdin>,
    groups: BufReader<ChildStdout>,
}

impl VllmServes {
    /// Starts it with the environment's Python; what it is told before it is ready waits.
    pub fn start(python: &str) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vllm_serves.py");
        let mut child = Command::new(python)
            .args(["-B", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python runs");
        let (orders, groups) = (child.stdin.take(), child.stdout.take().expect("a pipe"));
        Self { child, orders, groups: BufReader::new(groups) }
    }

    /// Starts `vllm serve` with these arguments. `plugin` is a folder with modules that it finds
    /// beside those of its environment; quiet, it says nothing.
    pub fn serve(&mut self, arguments: &[String], plugin: Option<&str>, quiet: bool) -> Group {
        let order = json!({"arguments": arguments, "python_path": plugin, "quiet": quiet});
        writeln!(self.orders.as_mut().expect("a pipe"), "{order}").expect("it listens");
        let mut group = String::new();
        self.groups.read_line(&mut group).expect("it answers");
        Group(group.trim().parse().expect("the id of a process group"))
    }
}

impl Drop for VllmServes {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

/// A process and all that it has started. Killed when dropped.
pub struct Group(u32);

impl Drop for Group {
    fn drop(&mut self) {
        let group = format!("-{}", self.0);
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
    }
}
