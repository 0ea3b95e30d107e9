//! Regenerates the golden files with the newest vLLM and reports the files that changed. With
//! another version it works on a copy of the repository and reports the differences.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::child;
use crate::error::Error;
use crate::setup::Setup;
use crate::vllm_env::VllmEnv;

/// The scripts. Each runs in the repository's root and writes its files where the tests read them.
const SCRIPTS: [Script; 12] = [
    Script::new("python/goldens/make_vision_goldens.py", Arguments::None),
    Script::new(
        "python/goldens/make_vision_kwargs_goldens.py",
        Arguments::Models(&["qwen2vl", "qwen25vl", "qwen3vl"]),
    ),
    Script::new("python/goldens/make_family_goldens.py", Arguments::None),
    Script::new("python/goldens/make_engine_kwargs_goldens.py", Arguments::None),
    Script::new("python/goldens/make_video_plan_goldens.py", Arguments::None),
    Script::new("python/goldens/make_video_pixel_goldens.py", Arguments::None),
    Script::new(
        "python/goldens/make_largest_item_goldens.py",
        Arguments::Models(&[
            "qwen2vl",
            "qwen25vl",
            "qwen3vl",
            "qwen3vl_moe",
            "qwen35",
            "llava",
            "llava_next",
            "llama4",
            "gemma3",
            "internvl",
            "internvl_chat",
            "pixtral",
            "mistral3",
        ]),
    ),
    Script::new("python/media_goldens/make_media_goldens.py", Arguments::None),
    Script::new("python/video_goldens/make_video_goldens.py", Arguments::None),
    Script::new(
        "python/audio_goldens/make_audio_goldens.py",
        Arguments::Models(&["qwen2audio", "omni"]),
    ),
    Script::new("python/prompt_goldens/make_prompt_goldens.py", Arguments::None),
    Script::new(
        "python/parse_goldens/make_parse_goldens.py",
        Arguments::Models(&["mistral_small"]),
    ),
];

#[derive(Clone, Copy)]
struct Script {
    path: &'static str,
    arguments: Arguments,
}

impl Script {
    const fn new(path: &'static str, arguments: Arguments) -> Self {
        Self { path, arguments }
    }
}

#[derive(Clone, Copy)]
enum Arguments {
    None,
    /// The directories of these tiny models.
    Models(&'static [&'static str]),
}

/// The hashes of files by their paths in the repository.
type Snapshot = BTreeMap<String, blake3::Hash>;

/// Runs all scripts and reports the changed files. `models` is the directory of the tiny models.
pub(crate) fn remake(setup: &Setup, env: &VllmEnv, models: &Path) -> Result<(), Error> {
    let root = &setup.workspace.root;
    let before = snapshot(root)?;
    run_scripts(setup, env, models, root)?;
    let changes = changes(&before, &snapshot(root)?);
    if changes.is_empty() {
        println!("the goldens are unchanged");
        return Ok(());
    }
    print!("{changes}");
    println!("changes since the last commit:");
    let mut diff = git(root);
    diff.args(["diff", "--stat"]);
    println!("{}", child::read(&mut diff, "git diff --stat")?);
    Ok(())
}

/// Runs all scripts on a copy of the repository and reports the lines that differ.
pub(crate) fn compare(setup: &Setup, env: &VllmEnv, models: &Path) -> Result<(), Error> {
    let root = &setup.workspace.root;
    let copy = tempfile::tempdir().map_err(Error::io("create", "a folder for a copy"))?;
    let copy = copy.path();
    let before = snapshot(root)?;
    for name in before.keys() {
        let to = copy.join(name);
        to.parent().map_or(Ok(()), fs::create_dir_all).map_err(Error::io("create", &to))?;
        fs::copy(root.join(name), &to).map_err(Error::io("copy", &to))?;
    }
    child::read(git(copy).args(["init", "-q"]), "git init")?;
    run_scripts(setup, env, models, copy)?;
    let after = snapshot(copy)?;
    let mut is_same = true;
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for name in names {
        if before.get(name) == after.get(name) {
            continue;
        }
        let read = |root: &Path| fs::read(root.join(name)).unwrap_or_default();
        let difference = difference(&read(root), &read(copy));
        if !difference.is_empty() {
            is_same = false;
            println!("{name}: {difference}");
        }
    }
    if is_same {
        println!("this version produces the same goldens");
    }
    Ok(())
}

/// Describes the differences between two files, except the versions that they were made with. Empty
/// if there are none.
fn difference(ours: &[u8], theirs: &[u8]) -> String {
    let (Ok(ours), Ok(theirs)) = (str::from_utf8(ours), str::from_utf8(theirs)) else {
        return "the bytes differ".to_owned();
    };
    let names_versions = |line: &&str| {
        ["vllm", "transformers", "tokenizers", "torch", "torchvision"]
            .iter()
            .any(|name| line.contains(&format!("\"{name}\": \"")))
    };
    let ours: HashSet<&str> = ours.lines().collect();
    let theirs: HashSet<&str> = theirs.lines().collect();
    let mut added: Vec<&str> =
        theirs.difference(&ours).copied().filter(|line| !names_versions(line)).collect();
    let gone = ours.difference(&theirs).filter(|line| !names_versions(line)).count();
    if added.is_empty() && gone == 0 {
        return String::new();
    }
    added.sort_unstable();
    let mut text = format!("{gone} of {} lines are gone, {} are new", ours.len(), added.len());
    for line in added.iter().take(SHOWN_LINES) {
        let _ = write!(text, "\n    {}", line.chars().take(SHOWN_CHARS).collect::<String>());
    }
    text
}

/// The number of different lines that are printed per file.
const SHOWN_LINES: usize = 3;
/// The number of characters that are printed of each such line.
const SHOWN_CHARS: usize = 160;

fn run_scripts(setup: &Setup, env: &VllmEnv, models: &Path, root: &Path) -> Result<(), Error> {
    for script in SCRIPTS {
        setup.workspace.file(script.path)?;
    }
    for Script { path, arguments } in SCRIPTS {
        setup.output.print_line(&format!("running {path}"))?;
        let mut python = env.python_command();
        // -B: no __pycache__ beside the script.
        python.args(["-B", path]);
        if let Arguments::Models(names) = arguments {
            python.args(names.iter().map(|name| models.join(name)));
        }
        python.current_dir(root).stdin(Stdio::null());
        child::run(&mut python, path, &setup.output, &setup.cancel)?;
    }
    Ok(())
}

fn git(root: &Path) -> Command {
    let mut git = Command::new("git");
    git.arg("-C").arg(root);
    // git sets these variables for hooks, and they take precedence over the directory.
    for name in ["GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"] {
        git.env_remove(name);
    }
    git
}

/// Hashes all files that git tracks or would track. The baseline is the working tree and not the
/// last commit, because a script is usually edited together with other uncommitted changes.
fn snapshot(root: &Path) -> Result<Snapshot, Error> {
    let mut list = git(root);
    list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let names = child::read(&mut list, "git ls-files")?;
    let mut snapshot = Snapshot::new();
    for name in names.split_terminator('\0') {
        let path = root.join(name);
        match fs::read(&path) {
            Ok(bytes) => snapshot.insert(name.to_owned(), blake3::hash(&bytes)),
            // The file is deleted in the working tree but not yet in the index.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(Error::io("read", path)(error)),
        };
    }
    Ok(snapshot)
}

/// Returns a line for each file that is new, different or gone.
fn changes(before: &Snapshot, after: &Snapshot) -> String {
    let mut lines = String::new();
    let mut line = |what: &str, name: &str| {
        // Writing to a String can't fail.
        let _ = writeln!(lines, "{what} {name}");
    };
    for (name, hash) in after {
        match before.get(name) {
            None => line("new      ", name),
            Some(old) if old != hash => line("different", name),
            Some(_) => {}
        }
    }
    for name in before.keys().filter(|name| !after.contains_key(*name)) {
        line("gone     ", name);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_versions_are_ignored() {
        let ours = b"{\"vllm\": \"0.33.0\"}\n{\"a\": 1}\n{\"b\": 2}\n";
        assert_eq!(difference(ours, b"{\"vllm\": \"0.32.0\"}\n{\"a\": 1}\n{\"b\": 2}\n"), "");
        let found = difference(ours, b"{\"vllm\": \"0.32.0\"}\n{\"a\": 1}\n{\"b\": 3}\n");
        assert_eq!(found, "1 of 3 lines are gone, 1 are new\n    {\"b\": 3}");
        assert!(difference(ours, b"").starts_with("2 of 3 lines are gone"));
        assert_eq!(difference(b"\xff", b"\xfe"), "the bytes differ");
    }

    #[test]
    fn changes_distinguish_new_different_gone_files() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        child::read(git(root).args(["init", "-q"]), "git init").unwrap();
        let write = |name: &str, text: &str| fs::write(root.join(name), text).unwrap();
        write("same", "1");
        write("different file", "1");
        write("gone", "1");
        write(".gitignore", "ignored\n");
        child::read(git(root).args(["add", "gone", "same"]), "git add").unwrap();
        let before = snapshot(root).unwrap();
        assert_eq!(changes(&before, &before), "");
        write("same", "1");
        write("different file", "2");
        write("new", "1");
        write("ignored", "1");
        fs::remove_file(root.join("gone")).unwrap();
        let after = snapshot(root).unwrap();
        assert_eq!(
            changes(&before, &after),
            "different different file\nnew       new\ngone      gone\n"
        );
    }
}
