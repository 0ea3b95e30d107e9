//! `docs/models.md`: every architecture that the newest vLLM registers and that takes more than
//! text, and how Chiasm serves it. Written of what vLLM's code says, kept beside the page as JSON,
//! and of this repository's own code and tests.
//!
//! | part | is |
//! |---|---|
//! | `facts` | what vLLM registers |
//! | `ours` | what Chiasm has code for, and what was compared |
//! | `table` | the two together, counted and by architecture |

mod facts;
mod ours;
mod table;

use std::fs;

use crate::error::Error;
use crate::setup::Setup;
use crate::vllm_env;
use crate::vllm_overlay::{self, NEWEST};
use crate::workspace::Workspace;
use crate::{models, versions_page};
use facts::Facts;
use table::Table;

const PAGE: &str = "docs/models.md";

const COLUMNS: &str = "\
## What the columns mean

An architecture is what a model's config.json names under `architectures`. The cells say who makes its items:

| cell | means |
|---|---|
| native | Chiasm's own code makes the images, with the bits of vLLM's processor ([images.md](images.md)). It goes by `model_type` in config.json: a model with another one, or with settings that the family does not have, gets vLLM's processor, as rare image formats do |
| compared | vLLM's processor makes them ([processor.md](processor.md)). On a real engine with a tiny random model of the architecture, prompt tokens and greedy tokens equal those of `vllm serve` |
| vLLM's processor | the same way, which asks nothing of a single model; but we have not tried this one |
| refused | not served, for the reason in the last column; told from vLLM's code, not tried with each |
| not known here | the class can't be looked at on the machine that writes this page, which has no GPU and no packages beyond vLLM's; on yours it may be served by vLLM's processor |

\"At most 1\" is the most items in a prompt that vLLM's code takes; without it there is no limit but `--limit-mm-per-prompt`. \"By its
files\": whether a model takes any depends on its own files, and is not known without them. A dash is a modality that the architecture
does not take.

*In prompts* says how items are written where that is out of the ordinary, which is that each replaces its marker:

- *inserted*: items have no marker and go to a place in the prompt, such as its beginning.
- *by vLLM's code*: the processor overrides how prompts are expanded, so a process of vLLM's processor expands each prompt with helped
  items. Prompts with native images alone are expanded by Chiasm.
- *by its files*: the model's files choose the processor.
- *conversations by vLLM's code*: the model has no chat template. A process of vLLM's processor writes its conversations as a whole.

Models of other architectures may be run by vLLM with the code of `transformers`, then as `TransformersMultiModalForCausalLM` and the
like.
";

const TRY: &str = "\
## How to try a model

```sh
chiasm serve /models/NAME --engines 1 -- --max-model-len 8192
```

[serving.md](serving.md) has the flags; give those that `vllm serve` needs for the model after `--`. Without a GPU, `--sim 1` in place of
`--engines 1` tries all but the engine.

1. The log at the start has the line `vLLM's processor is ready`, with its version and the `modalities` that this model takes. If the
   model can't be served, the server ends and says why. A native family starts without that line, until the first video, recording or
   rare image; `chiasm inspect --model /models/NAME IMAGE` shows what it makes of an image.
2. Send a request with the media:

   ```sh
   curl -si http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d '{
     \"model\": \"/models/NAME\", \"max_tokens\": 32, \"temperature\": 0, \"return_token_ids\": true,
     \"messages\": [{\"role\": \"user\", \"content\": [
       {\"type\": \"video_url\", \"video_url\": {\"url\": \"https://example.org/clip.mp4\"}},
       {\"type\": \"text\", \"text\": \"What happens?\"}]}]}'
   ```

3. Send the same one to `vllm serve` with the same flags: `prompt_token_ids` have to be equal. If they are not, or if there is an error,
   please report the architecture, the log and the request.
";

/// Asks the newest vLLM and writes the page.
pub(crate) fn run(setup: &Setup) -> Result<(), Error> {
    let base = vllm_env::ensure(setup)?;
    let models = models::ensure(setup, &base)?;
    let env = vllm_overlay::ensure_version(setup, &base, NEWEST)?;
    let facts = Facts::ask(setup, &env, &models)?;
    facts.write(&setup.workspace)?;
    let path = setup.workspace.root.join(PAGE);
    fs::write(&path, page(&setup.workspace, &facts)?).map_err(Error::io("write", path))?;
    // It says how a version is added, this page included.
    versions_page::write_page(&setup.workspace)
}

fn page(workspace: &Workspace, facts: &Facts) -> Result<String, Error> {
    let native = ours::native(workspace)?;
    let table = Table::of(facts, &native);
    let version = &facts.registered.vllm;
    let number = facts.registered.architectures.len();
    Ok(format!(
        "# Models\n\nWritten by `cargo xtask models-page`, from what vLLM {version} registers ([models.json](models.json)) and from this \
         repository's\ncode and tests. Models of text alone are not listed.\n\nvLLM {version} registers {number} architectures that take \
         more than text. This many of them take:\n\n{}\n{}\n{COLUMNS}\n{TRY}\n## Architectures\n\n{}",
        table.counts(),
        table.refusals(),
        table.rows(),
    ))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_repository_s_page_is_made_of_the_facts_beside_it() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let workspace = Workspace { root: root.to_owned(), cache: root.join("nowhere") };
        let facts = Facts::read(&workspace).unwrap();
        let again = "run `cargo xtask models-page`";
        assert_eq!(facts.registered.vllm, NEWEST, "{again}");
        assert!(
            facts
                .compared
                .keys()
                .all(|family| ours::COMPARED.iter().any(|(name, _)| name == family)),
            "{again}"
        );
        assert_eq!(facts.compared.len(), ours::COMPARED.len(), "{again}");
        assert_eq!(
            fs::read_to_string(root.join(PAGE)).unwrap(),
            page(&workspace, &facts).unwrap(),
            "{again}"
        );
    }

    #[test]
    fn what_is_native_or_compared_is_registered() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let workspace = Workspace { root: root.to_owned(), cache: root.join("nowhere") };
        let facts = Facts::read(&workspace).unwrap();
        let is_registered =
            |name: &str| facts.registered.architectures.iter().any(|one| one.name == name);
        for native in ours::native(&workspace).unwrap() {
            assert!(is_registered(&native.architecture), "{native:?}");
        }
        for (family, architecture) in &facts.compared {
            assert!(is_registered(architecture), "{family}: {architecture}");
        }
    }
}
