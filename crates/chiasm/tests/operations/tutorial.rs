//! Runs the commands of `docs/tutorial.md` with simulated engines in place of GPUs.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use super::metrics::ROOT;
use crate::support::{chiasm, demo_model, free_port};

/// The start of code blocks that this test runs, all of them in one shell.
const TESTED_BLOCK: &str = "```sh tried\n";
/// The script's prologue. The trap ends background processes however the shell ends.
const PROLOGUE: &str = "trap 'kill $(jobs -p) 2>/dev/null' EXIT\nset -euo pipefail\n";
/// The time limit of the whole script in seconds.
const TIMEOUT_SECONDS: &str = "120";

/// Extracts the commands of the page, and replaces machines, ports and GPUs by local ones.
fn commands(page: &str) -> String {
    let [port, first, second] = [(); 3].map(|()| free_port().to_string());
    let blocks = page
        .split(TESTED_BLOCK)
        .skip(1)
        .filter_map(|block| block.split_once("```"))
        .map(|(commands, _)| commands);
    let localize = |block: &str| {
        let agent = if block.contains("gpu2.pem") { &second } else { &first };
        // Placeholders keep new port numbers apart from the page's own: one of them may be part of
        // another.
        let block =
            block.replace("gpu1:8100", "127.0.0.1:FIRST").replace("gpu2:8100", "127.0.0.1:SECOND");
        let block =
            block.replace("8100", agent).replace("FIRST", &first).replace("SECOND", &second);
        let block = block.replace("127.0.0.1:8000", &format!("127.0.0.1:{port}"));
        let block = block.replace("chiasm serve", &format!("chiasm serve --port {port}"));
        block
            .replace("--engines 2 --gpus-per-engine 1", "--sim 2")
            .replace("0.0.0.0", "127.0.0.1")
            .replace("DNS:$name", "IP:127.0.0.1")
    };
    blocks.map(localize).collect::<Vec<_>>().join("\n")
}

#[test]
fn tutorial_commands_give_the_documented_output() {
    for tool in ["curl", "openssl", "bash", "timeout"] {
        if Command::new(tool)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_err()
        {
            println!("skipped: {tool} is not installed");
            return;
        }
    }
    let page = std::fs::read_to_string(format!("{ROOT}/docs/tutorial.md")).expect("the page");
    let commands = commands(&page);
    let folder = tempfile::tempdir().expect("a folder");
    let picture = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/images/dawn.jpg");
    std::fs::copy(picture, folder.path().join("cat.jpg")).expect("a picture");
    let program = chiasm(&[]);
    let programs =
        Path::new(program.get_program()).parent().expect("a folder").display().to_string();
    let path = format!("{programs}:{}", std::env::var("PATH").unwrap_or_default());
    let mut shell = Command::new("timeout");
    shell
        .args([TIMEOUT_SECONDS, "bash", "-s"])
        .current_dir(&folder)
        .env("PATH", path)
        .env("MODEL", demo_model());
    shell.env("CHIASM_STATE_DIR", folder.path());
    let mut shell = shell
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("a shell");
    let mut stdin = shell.stdin.take().expect("a pipe");
    stdin.write_all(format!("{PROLOGUE}{commands}").as_bytes()).expect("an open pipe");
    drop(stdin);
    let output = shell.wait_with_output().expect("an exit");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{:?}\n{stdout}\n{commands}", output.status);
    let header_values = |name: &str| -> Vec<&str> {
        stdout
            .lines()
            .filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
            .map(str::trim)
            .collect()
    };
    let overlaps = header_values("x-chiasm-overlap");
    let [first, second, with_key, through_agents] = overlaps[..] else { panic!("{stdout}") };
    let blocks = first.strip_prefix("0/").unwrap_or_else(|| panic!("{stdout}"));
    assert_eq!(second, format!("{blocks}/{blocks}"), "{stdout}");
    assert_eq!([with_key, through_agents], [first; 2], "{stdout}");
    assert_eq!(header_values("x-chiasm-transfer")[1], "cached", "{stdout}");
    let fleet = std::fs::read_to_string(folder.path().join("fleet.html")).expect("a page");
    assert!(fleet.contains("mixed by the number of workers"));
}
