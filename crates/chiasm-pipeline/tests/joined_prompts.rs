//! Gemma 3's prompts: placeholders whose line breaks join those around them, as vLLM 0.32 has them
//! (`python/goldens/make_family_goldens.py`).

#![allow(clippy::unwrap_used, reason = "a test crate, all of it")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use chiasm_prompt::{Item, Marker, Markers, expand};
use chiasm_types::{Modality, TokenId};
use chiasm_vision::{ImagePrompt, ImageSize, VisionModel, Vocabulary, VocabularyError};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Cases {
    models: BTreeMap<String, Model>,
}

/// Knows special tokens and the words between crops, longest first.
#[derive(Deserialize)]
struct Model {
    vocabulary: BTreeMap<String, u32>,
    texts: BTreeMap<String, Vec<u32>>,
}

impl Vocabulary for Model {
    fn id(&self, token: &str) -> Option<TokenId> {
        self.vocabulary.get(token).copied().map(TokenId)
    }

    fn encode(&self, text: &str) -> Result<Vec<TokenId>, VocabularyError> {
        let tokens = self.vocabulary.iter().map(|(text, id)| (text, std::slice::from_ref(id)));
        let known: Vec<_> =
            tokens.chain(self.texts.iter().map(|(text, ids)| (text, ids.as_slice()))).collect();
        let mut encoded = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let longest = known
                .iter()
                .filter(|(text, _)| rest.starts_with(text.as_str()))
                .max_by_key(|(text, _)| text.len());
            let (text, ids) = longest.ok_or_else(|| VocabularyError::NoToken(rest.to_owned()))?;
            encoded.extend(ids.iter().copied().map(TokenId));
            rest = &rest[text.len()..];
        }
        Ok(encoded)
    }
}

#[derive(Deserialize)]
struct Prompts {
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    model: String,
    text: String,
    tokens: Vec<u32>,
    images: Vec<[u32; 2]>,
    kwargs: Map<String, Value>,
    #[serde(default)]
    expanded: Vec<(u32, usize)>,
    #[serde(default)]
    placeholders: Vec<Placeholder>,
}

#[derive(Deserialize)]
struct Placeholder {
    offset: usize,
    length: usize,
    embeds: Vec<(usize, bool)>,
}

fn golden(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../chiasm-vision/tests/goldens/families/gemma3")
        .join(file)
}

#[test]
fn line_breaks_around_images_join_as_in_vllm() {
    let Cases { models } =
        serde_json::from_slice(&std::fs::read(golden("cases.json")).unwrap()).unwrap();
    let Prompts { prompts } =
        serde_json::from_slice(&std::fs::read(golden("prompts.json")).unwrap()).unwrap();
    let mut compared = 0;
    for prompt in prompts {
        let dir = golden("models").join(&prompt.model);
        let model = VisionModel::from_model_dir(&dir, &models[&prompt.model]).unwrap().unwrap();
        let kwargs = model.parse_kwargs(&prompt.kwargs).unwrap();
        let runs = prompt.images.iter().map(|&[width, height]| {
            model.plan(ImageSize { width, height }, &kwargs).unwrap().placeholder
        });
        let runs: Vec<_> = runs.collect();
        let ImagePrompt { marker, joins, .. } = model.prompt();
        let tokens: Vec<_> = prompt.tokens.iter().copied().map(TokenId).collect();
        let items: Vec<_> =
            runs.iter().map(|runs| Item { modality: &Modality::Image, runs }).collect();
        let of_image = Marker { modality: &Modality::Image, tokens: marker };
        let expanded =
            expand(&tokens, Markers { by_modality: &[of_image], joins }, &items).unwrap();
        if prompt.expanded.is_empty() {
            // vLLM fails a prompt in which one line break follows an image; ours stays within its
            // tokens.
            assert!(
                expanded
                    .placeholders
                    .iter()
                    .all(|place| place.offset + place.length <= expanded.tokens.len())
            );
            continue;
        }
        compared += 1;
        let theirs = prompt
            .expanded
            .iter()
            .flat_map(|&(token, count)| std::iter::repeat_n(TokenId(token), count));
        assert!(expanded.tokens.iter().copied().eq(theirs), "{:?}", prompt.text);
        assert_eq!(expanded.placeholders.len(), prompt.placeholders.len());
        for (ours, theirs) in expanded.placeholders.iter().zip(&prompt.placeholders) {
            assert_eq!(
                (ours.offset, ours.length),
                (theirs.offset, theirs.length),
                "{:?}",
                prompt.text
            );
            let mask = theirs
                .embeds
                .iter()
                .flat_map(|&(count, embeds)| std::iter::repeat_n(embeds, count));
            assert!(ours.is_embed.iter().flatten().copied().eq(mask), "{:?}", prompt.text);
        }
    }
    assert!(compared >= 6, "only {compared} prompts");
}
