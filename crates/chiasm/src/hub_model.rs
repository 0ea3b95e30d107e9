//! A model given by its id on the Hugging Face hub.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use chiasm_hub::{HubRequest, HubSettings, Progress, Revision, WantedFiles, Weights, fetch};

use crate::cli::ServeArgs;
use crate::download_bar::DownloadBar;
use crate::error::CliError;
use crate::vllm_flags::VllmFlags;

/// Resolves MODEL to a directory.
///
/// An existing directory is left as it is. The id of a model on the hub is replaced with the folder
/// of its snapshot in the hub's cache, after a download of missing files. Launched engines get that
/// folder too, so that all use the same revision.
///
/// # Errors
/// [`CliError::Usage`] if MODEL is neither a directory nor an id, or if a given revision can't be
/// applied; [`CliError::HubModel`] if the download fails.
pub(crate) async fn resolve(args: &mut ServeArgs, flags: &VllmFlags) -> Result<(), CliError> {
    let Some(request) = hub_request(args, flags)? else { return Ok(()) };
    let progress = Arc::new(Progress::default());
    let bar = DownloadBar::show(request.repo.to_string(), progress.clone());
    let fetched = fetch(&request, &progress).await;
    drop(bar);
    let snapshot =
        fetched.map_err(|source| CliError::HubModel { model: args.model.clone(), source })?;
    tracing::info!(
        model = %request.repo,
        revision = %request.revision,
        commit = snapshot.commit,
        dir = %snapshot.dir.display(),
        "the model is in the hub's cache"
    );
    args.model = snapshot.dir;
    args.hub_files = snapshot.files;
    Ok(())
}

/// Downloads a LoRA adapter of the hub and returns its folder, or `None` if `id` is not a hub id.
///
/// # Errors
/// [`CliError::Hub`] if the download fails.
pub(crate) async fn fetch_adapter(id: &str) -> Result<Option<PathBuf>, CliError> {
    let Ok(repo) = id.parse() else { return Ok(None) };
    let wanted = WantedFiles { weights: Some(Weights::All), code: false };
    let request = HubRequest {
        repo,
        revision: Revision::default(),
        wanted,
        settings: HubSettings::from_env()?,
    };
    let progress = Arc::new(Progress::default());
    let bar = DownloadBar::show(request.repo.to_string(), progress.clone());
    let fetched = fetch(&request, &progress).await;
    drop(bar);
    Ok(Some(fetched?.dir))
}

/// Checks that MODEL is a model's folder, or has the form of a hub id. Does not ask the hub.
///
/// # Errors
/// [`CliError::Usage`] if it is neither, or if a given revision can't be applied.
pub(crate) fn check(args: &ServeArgs, flags: &VllmFlags) -> Result<(), CliError> {
    hub_request(args, flags).map(drop)
}

/// Returns the download that MODEL needs, or `None` for a directory.
fn hub_request(args: &ServeArgs, flags: &VllmFlags) -> Result<Option<HubRequest>, CliError> {
    let model = args.model.display();
    if args.model.is_file() {
        let message = format!(
            "MODEL {model} is a file: give the directory that has config.json \
             and the other files of the model"
        );
        return Err(CliError::Usage(message));
    }
    let exists = match args.model.try_exists() {
        Err(source) if source.kind() == ErrorKind::PermissionDenied => {
            return Err(CliError::file(&args.model, source));
        }
        exists => exists.unwrap_or(false),
    };
    if exists {
        check_folder(&args.model)?;
        return match &args.revision {
            Some(_) => Err(CliError::Usage(format!(
                "--revision is for models on the hub, but {model} is a local directory: \
                 leave --revision out"
            ))),
            None => Ok(None),
        };
    }
    let Some(repo) = args.model.to_str().and_then(|id| id.parse().ok()) else {
        let example = "Qwen/Qwen2.5-VL-7B-Instruct";
        return Err(CliError::Usage(format!(
            "MODEL {model} is neither a directory nor the id of a model on the hub, \
             such as {example}"
        )));
    };
    if flags.has_revision {
        // vLLM gets a directory and would ignore the flag.
        let message = "--revision after -- has no effect on vLLM: give it before --, \
                       for Chiasm and vLLM together";
        return Err(CliError::Usage(message.to_owned()));
    }
    let launches = args.launched().total() > 0;
    let kind = if flags.load_format == "auto" { Weights::AsVllmChooses } else { Weights::All };
    Ok(Some(HubRequest {
        repo,
        revision: args.revision.clone().unwrap_or_default(),
        wanted: WantedFiles { weights: launches.then_some(kind), code: flags.trust_remote_code },
        settings: HubSettings::from_env()?,
    }))
}

/// Refuses a folder without a model in the format of `transformers`.
///
/// # Errors
/// [`CliError::Usage`] for a folder with none of `config.json`, `params.json` and `tokenizer.json`.
fn check_folder(folder: &Path) -> Result<(), CliError> {
    let has = |name: &str| folder.join(name).exists();
    // Mistral's own format has params.json; a tokenizer alone is enough for tests and tools.
    if ["config.json", "params.json", "tokenizer.json"].into_iter().any(has) {
        return Ok(());
    }
    let is_gguf = |path: PathBuf| {
        path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
    };
    let has_gguf =
        folder.read_dir().is_ok_and(|files| files.flatten().any(|file| is_gguf(file.path())));
    let problem = if has_gguf {
        "has only GGUF files: Chiasm reads config.json, tokenizer.json and the processor's \
         configuration, which GGUF lacks; give the folder or hub id of the model that the GGUF \
         files were made from"
    } else {
        "has no config.json: give the folder that has the model's config.json, tokenizer.json and \
         weights"
    };
    Err(CliError::Usage(format!("MODEL {} {problem}", folder.display())))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parse(args: &[&str]) -> Result<Option<HubRequest>, String> {
        let cli = ["chiasm", "serve"].iter().chain(args);
        let Command::Serve(args) = Cli::parse_from(cli).command else { panic!("serve") };
        hub_request(&args, &VllmFlags::parse(&args.vllm_args).unwrap())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn directory_needs_no_download() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        assert!(parse(&[path]).unwrap().is_none());
        assert!(parse(&[path, "--", "--revision", "v1"]).unwrap().is_none());
        assert!(parse(&[path, "--revision", "v1"]).unwrap_err().contains("--revision"));
    }

    #[test]
    fn folder_without_a_model_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        assert!(parse(&[path]).unwrap_err().contains("has no config.json"));
        std::fs::write(dir.path().join("model-q4_k_m.GGUF"), "GGUF").unwrap();
        assert!(parse(&[path]).unwrap_err().contains("has only GGUF files"));
    }

    #[test]
    fn download_includes_weights_and_code_only_if_needed() {
        let wanted = |args: &[&str]| {
            let WantedFiles { weights, code } =
                parse(&[&["owner/name"], args].concat()).unwrap().unwrap().wanted;
            (weights, code)
        };
        assert_eq!(wanted(&[]), (Some(Weights::AsVllmChooses), false));
        assert_eq!(
            wanted(&["--engines", "2", "--", "--load-format", "hf"]),
            (Some(Weights::All), false)
        );
        assert_eq!(wanted(&["--sim", "1"]), (None, false));
        assert_eq!(wanted(&["--agents", "gpu1:8100"]), (None, false));
        assert_eq!(
            wanted(&["--agents", "gpu1:8100", "--engines", "1"]).0,
            Some(Weights::AsVllmChooses)
        );
        assert_eq!(wanted(&["--upstream", "http://gpu1:8000"]), (None, false));
        assert_eq!(
            wanted(&["--attach", "tcp://127.0.0.1:1", "--", "--trust-remote-code"]),
            (None, true)
        );
    }

    #[test]
    fn invalid_model_or_revision_is_refused() {
        for model in ["/models/typo", "./typo", "a/b/c", "~/x"] {
            assert!(parse(&[model]).unwrap_err().contains(model), "{model}");
        }
        assert!(parse(&["owner/name", "--", "--revision=v1"]).unwrap_err().contains("before --"));
        let revision = parse(&["owner/name", "--revision", "refs/pr/1"]).unwrap().unwrap().revision;
        assert_eq!(revision.as_str(), "refs/pr/1");
        assert!(
            Cli::try_parse_from(["chiasm", "serve", "owner/name", "--revision", "../x"]).is_err()
        );
    }
}
