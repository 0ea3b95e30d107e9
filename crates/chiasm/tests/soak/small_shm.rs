//! A private `/dev/shm` for the soak test, which it can fill without affecting other processes.

use std::env;
use std::process::{Command, Stdio};

/// The variable that is set in a process with a private `/dev/shm`. Its value is the path of a file
/// that the test creates to show that it ran.
const OWN_SHM: &str = "CHIASM_SOAK_OWN_SHM";
/// The mount command. The size fits the arenas of all engines twice, as killed engines keep theirs
/// for a moment.
const MOUNT: &str = "mount -t tmpfs -o size=400m tmpfs /dev/shm";

/// Returns `true` if this process has a small `/dev/shm`.
pub(crate) fn is_own() -> bool {
    let Some(marker) = env::var_os(OWN_SHM) else { return false };
    std::fs::write(marker, "").expect("written");
    true
}

/// Runs an ignored test again in a mount namespace with a small `/dev/shm`, which its children
/// inherit. This needs no root where the system allows user namespaces.
///
/// Returns `false` if no namespace can be created.
///
/// # Panics
/// If the test fails in the namespace, or is not found.
pub(crate) fn run_in_namespace(test: &str) -> bool {
    let Some(flags) = ["-m", "-Urm"]
        .into_iter()
        .find(|flags| run_unshared(flags, MOUNT).is_ok_and(|status| status))
    else {
        eprintln!("can't create a mount namespace: the soak runs without filling /dev/shm");
        return false;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let marker = folder.path().join("ran");
    let script = format!("{MOUNT} && exec \"$0\" \"$@\"");
    let mut again = Command::new("unshare");
    again.args([flags, "sh", "-c", &script]).arg(env::current_exe().expect("a program"));
    again.args([test, "--exact", "--ignored", "--nocapture"]).env(OWN_SHM, &marker);
    let status = again.status().expect("unshare starts");
    assert!(status.success(), "{test} in a namespace: {status}");
    assert!(marker.exists(), "no test {test}");
    true
}

/// Runs a shell script in new namespaces. Returns `true` if it succeeds.
fn run_unshared(flags: &str, script: &str) -> std::io::Result<bool> {
    Command::new("unshare")
        .args([flags, "sh", "-c", script])
        .stderr(Stdio::null())
        .status()
        .map(|status| status.success())
}
