//! A `/dev/shm` of this test's own, small enough to be filled without harm to others.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Set where this process has its own.
const THERE: &str = "CHIASM_SOAK_OWN_SHM";
/// Room for the arenas of all engines, and for as many of engines that were just killed.
const MOUNT: &str = "mount -t tmpfs -o size=400m tmpfs /dev/shm";

/// Whether this process has a small `/dev/shm`. If it has none but could, it starts again in a namespace where it has: what it
/// starts then has it too. That takes no root, but a system that lets users make namespaces.
pub(crate) fn is_there() -> bool {
    if env::var_os(THERE).is_some() {
        return true;
    }
    let Some(flags) = ["-m", "-Urm"].into_iter().find(|flags| unshared(flags, MOUNT).is_ok_and(|status| status)) else {
        eprintln!("no namespace can be made here: /dev/shm is not filled");
        return false;
    };
    let inside = format!("{MOUNT} && exec \"$0\" \"$@\"");
    let this = env::current_exe().expect("a program");
    let mut again = Command::new("unshare");
    again.args([flags, "sh", "-c", &inside]).arg(this).args(env::args_os().skip(1)).env(THERE, "1");
    panic!("it could be done a moment ago: {}", again.exec());
}

fn unshared(flags: &str, script: &str) -> std::io::Result<bool> {
    Command::new("unshare")
        .args([flags, "sh", "-c", script])
        .stderr(Stdio::null())
        .status()
        .map(|status| status.success())
}
