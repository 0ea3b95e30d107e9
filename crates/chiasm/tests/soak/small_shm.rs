//! A `/dev/shm` of this test's own, small enough to be filled without harm to others.

use std::env;
use std::process::{Command, Stdio};

/// Set where this process has its own.
const THERE: &str = "CHIASM_SOAK_OWN_SHM";
/// Room for the arenas of all engines, and for as many of engines that were just killed.
const MOUNT: &str = "mount -t tmpfs -o size=400m tmpfs /dev/shm";

/// Returns `true` if this process has a small `/dev/shm`.
pub(crate) fn is_there() -> bool {
    env::var_os(THERE).is_some()
}

/// Runs a test again, in a namespace with a small `/dev/shm`: what it starts has it too. That takes no root, but a
/// system that lets users make namespaces. Returns `false` where none can be made.
///
/// # Panics
/// If the test fails there.
pub(crate) fn run_there(test: &str) -> bool {
    let Some(flags) = ["-m", "-Urm"].into_iter().find(|flags| unshared(flags, MOUNT).is_ok_and(|status| status)) else {
        eprintln!("no namespace can be made here: /dev/shm is not filled");
        return false;
    };
    let inside = format!("{MOUNT} && exec \"$0\" \"$@\"");
    let this = env::current_exe().expect("a program");
    let mut again = Command::new("unshare");
    again.args([flags, "sh", "-c", &inside]).arg(this).args([test, "--exact", "--ignored", "--nocapture"]);
    let status = again.env(THERE, "1").status().expect("it could be done a moment ago");
    assert!(status.success(), "{test} in a namespace: {status}");
    true
}

fn unshared(flags: &str, script: &str) -> std::io::Result<bool> {
    Command::new("unshare")
        .args([flags, "sh", "-c", script])
        .stderr(Stdio::null())
        .status()
        .map(|status| status.success())
}
