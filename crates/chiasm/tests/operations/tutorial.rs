//! `docs/tutorial.md` as its readers run it, with simulated engines in place of GPUs.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use super::metrics::ROOT;
use crate::support::{chiasm, demo_model, free_port};

/// How blocks begin whose commands are run here, all of them by one shell.
const TRIED: &str = "```sh tried\n";
/// Ends whatever runs in the background, however the shell ends.
const BEFORE: &str = "trap 'kill $(jobs -p) 2>/dev/null' EXIT\nset -euo pipefail\n";
/// Nothing in it takes minutes.
const PATIENCE: &str = "120";

/// The commands of the page, with the names of machines, ports and GPUs replaced by what there is
/// here.
fn commands(page: &str) -> String {
    let [door, first, second] = [(); 3].map(|()| free_port().to_string());
    let blocks = page
        .split(TRIED)
        .skip(1)
        .filter_map(|block| block.split_once("```"))
        .map(|(commands, _)| commands);
    let here = |block: &str| {
        let agent = if block.contains("gpu2.pem") { &second } else { &first };
        // Names stand in for the ports until all of the page's own are gone: one of them may be
        // part of another.
        let block =
            block.replace("gpu1:8100", "127.0.0.1:FIRST").replace("gpu2:8100", "127.0.0.1:SECOND");
        let block =
            block.replace("8100", agent).replace("FIRST", &first).replace("SECOND", &second);
        let block = block.replace("127.0.0.1:8000", &format!("127.0.0.1:{door}"));
        let block = block.replace("chiasm serve", &format!("chiasm serve --port {door}"));
        block
            .replace("--engines 2 --gpus-per-engine 1", "--sim 2")
            .replace("0.0.0.0", "127.0.0.1")
            .replace("DNS:$name", "IP:127.0.0.1")
    };
    blocks.map(here).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_tutorial_does_what_it_says() {
    for tool in ["curl", "openssl", "bash", "timeout"] {
        if Command::new(tool)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_err()
        {
            println!("left out: there is no {tool}");
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
        .args([PATIENCE, "bash", "-s"])
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
    let mut words = shell.stdin.take().expect("a pipe");
    words.write_all(format!("{BEFORE}{commands}").as_bytes()).expect("it reads");
    drop(words);
    let output = shell.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{:?}\n{said}\n{commands}", output.status);
    let told = |name: &str| -> Vec<&str> {
        said.lines()
            .filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
            .map(str::trim)
            .collect()
    };
    let overlaps = told("x-chiasm-overlap");
    let [first, second, with_key, through_agents] = overlaps[..] else { panic!("{said}") };
    let blocks = first.strip_prefix("0/").unwrap_or_else(|| panic!("{said}"));
    assert_eq!(second, format!("{blocks}/{blocks}"), "{said}");
    assert_eq!([with_key, through_agents], [first; 2], "{said}");
    assert_eq!(told("x-chiasm-transfer")[1], "cached", "{said}");
    let fleet = std::fs::read_to_string(folder.path().join("fleet.html")).expect("a page");
    assert!(fleet.contains("mixed by the number of workers"));
}
