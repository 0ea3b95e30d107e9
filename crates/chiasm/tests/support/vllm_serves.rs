//! Many `vllm serve` processes forked from one process that imports vLLM once; see
//! `vllm_serves.py`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::json;

/// The process that has imported vLLM. It ends with all of its children when this is dropped, or
/// when the test process ends in any way.
pub struct VllmServes {
    child: Child,
    orders: Option<ChildStdin>,
    group_ids: BufReader<ChildStdout>,
}

impl VllmServes {
    /// Starts the process with `python`. Orders sent before it is ready are queued.
    pub fn start(python: &str) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vllm_serves.py");
        let mut child = Command::new(python)
            .args(["-B", script])
            // vLLM 0.33 would bind several engines of one server to nodes of memory that there
            // are not.
            .env("VLLM_CPU_SIM_MULTI_NUMA", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python runs");
        let orders = child.stdin.take();
        let group_ids = child.stdout.take().expect("a pipe");
        Self { child, orders, group_ids: BufReader::new(group_ids) }
    }

    /// Starts `vllm serve` with `arguments`.
    ///
    /// `plugin` is a folder added to its Python path. If `quiet`, its output is discarded.
    pub fn serve(&mut self, arguments: &[String], plugin: Option<&str>, quiet: bool) -> Group {
        let order = json!({"arguments": arguments, "python_path": plugin, "quiet": quiet});
        writeln!(self.orders.as_mut().expect("a pipe"), "{order}").expect("an open pipe");
        let mut group = String::new();
        self.group_ids.read_line(&mut group).expect("an answer");
        Group(group.trim().parse().expect("the id of a process group"))
    }
}

impl Drop for VllmServes {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

/// A process group. Killed when dropped.
pub struct Group(u32);

impl Drop for Group {
    fn drop(&mut self) {
        let group = format!("-{}", self.0);
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
    }
}
