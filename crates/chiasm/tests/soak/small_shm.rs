//! A `/dev/shm` of this test's own, small enough to be filled without harm to others.

use std::env;
use std::process::{Command, Stdio};

/// Set in a process that has its own: the file with which a test shows that it ran.
const OWN_SHM: &str = "CHIASM_SOAK_OWN_SHM";
/// Room for the arenas of all engines, and for as many of engines that were just killed.
const MOUNT: &str = "mount -t tmpfs -o size=400m tmpfs /dev/shm";

/// Returns `true` if this process has a small `/dev/shm`.
pub(crate) fn is_own() -> bool {
    let Some(shows) = env::var_os(OWN_SHM) else { return false };
    std::fs::write(shows, "").expect("written");
    true
}

/// Runs an ignored test again, in a mount namespace with a small `/dev/shm`, which its children
/// inherit. That takes no root where the system allows user namespaces. Returns `false` if no
/// namespace can be made.
///
/// # Panics
/// If the test fails in the namespace, or is not found.
pub(crate) fn run_in_namespace(test: &str) -> bool {
    let Some(flags) =
        ["-m", "-Urm"].into_iter().find(|flags| unshared(flags, MOUNT).is_ok_and(|status| status))
    else {
        eprintln!("no namespace can be made here: /dev/shm is not filled");
        return false;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let shows = folder.path().join("ran");
    let inside = format!("{MOUNT} && exec \"$0\" \"$@\"");
    let mut again = Command::new("unshare");
    again.args([flags, "sh", "-c", &inside]).arg(env::current_exe().expect("a program"));
    again.args([test, "--exact", "--ignored", "--nocapture"]).env(OWN_SHM, &shows);
    let status = again.status().expect("unshare starts");
    assert!(status.success(), "{test} in a namespace: {status}");
    assert!(shows.exists(), "no test {test}");
    true
}

fn unshared(flags: &str, script: &str) -> std::io::Result<bool> {
    Command::new("unshare")
        .args([flags, "sh", "-c", script])
        .stderr(Stdio::null())
        .status()
        .map(|status| status.success())
}
