//! The tables of the page: the maker of items for each architecture and modality.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::facts::{Architecture, Facts, Limit, Refusal};
use super::ours::{Native, is_compared};

/// The modalities with a column of their own.
const MODALITIES: [&str; 3] = ["image", "video", "audio"];
/// The column of all other modalities.
const OTHER: &str = "other";

/// The maker of items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Maker {
    Native,
    Compared,
    Processor,
    Refused,
    Unknown,
}

impl Maker {
    const ALL: [Self; 5] =
        [Self::Native, Self::Compared, Self::Processor, Self::Refused, Self::Unknown];

    fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Compared => "compared",
            Self::Processor => "vLLM's processor",
            Self::Refused => "refused",
            Self::Unknown => "not known here",
        }
    }
}

/// A modality of an architecture.
#[derive(Clone, Debug)]
struct Cell {
    maker: Maker,
    /// vLLM's name of the modality, unless it is one of [`MODALITIES`].
    name: Option<String>,
    limit: Limit,
}

/// The architectures with their cells by column.
#[derive(Debug)]
pub(super) struct Table<'a> {
    rows: Vec<(&'a Architecture, BTreeMap<&'static str, Cell>)>,
}

impl<'a> Table<'a> {
    /// Creates a table of all architectures in `facts`.
    pub(super) fn new(facts: &'a Facts, native: &BTreeSet<Native>) -> Self {
        let cells =
            |architecture: &'a Architecture| (architecture, cells(facts, native, architecture));
        Self { rows: facts.registered.architectures.iter().map(cells).collect() }
    }

    /// Returns a table that counts architectures by maker and modality.
    pub(super) fn counts(&self) -> String {
        let mut text = row(&["", "image", "video", "audio", OTHER]) + "|---|---|---|---|---|\n";
        let count = |column: &str, is_counted: &dyn Fn(&Cell) -> bool| {
            let cells = self.rows.iter().filter_map(|(_, cells)| cells.get(column));
            cells.filter(|cell| is_counted(cell)).count().to_string()
        };
        let columns = [MODALITIES[0], MODALITIES[1], MODALITIES[2], OTHER];
        let mut add = |name: &str, is_counted: &dyn Fn(&Cell) -> bool| {
            let numbers = columns.map(|column| count(column, is_counted));
            text += &row(&[&[name], &numbers.each_ref().map(String::as_str)[..]].concat());
        };
        for maker in Maker::ALL {
            add(maker.name(), &|cell| cell.maker == maker);
        }
        add("total known", &|cell| cell.maker != Maker::Unknown);
        add("of these, known only from a model's files", &|cell| {
            cell.maker != Maker::Unknown && !cell.limit.certain
        });
        text
    }

    /// Returns a list of the reasons for refusals with the number of architectures.
    pub(super) fn refusals(&self) -> String {
        let mut counts = BTreeMap::new();
        for reason in
            self.rows.iter().filter_map(|(architecture, cells)| reason(architecture, cells))
        {
            *counts.entry(reason).or_insert(0_u32) += 1;
        }
        let total: u32 = counts.values().sum();
        let mut text = format!("{total} architectures are refused:\n\n");
        for (Reason { name, means, .. }, count) in counts {
            // Writing to a String can't fail.
            let _ = writeln!(text, "- {count} **{name}**: {means}.");
        }
        text
    }

    /// Returns a table with a row for each architecture.
    pub(super) fn rows(&self) -> String {
        let head = ["architecture", "image", "video", "audio", OTHER, "in prompts", "why"];
        let mut text = row(&head) + "|---|---|---|---|---|---|---|\n";
        for (architecture, cells) in &self.rows {
            let cell = |column: &str| cells.get(column).map_or("–".to_owned(), words);
            let other = cells.get(OTHER).map_or(String::new(), words);
            text += &row(&[
                &format!("`{}`", architecture.name),
                &cell(MODALITIES[0]),
                &cell(MODALITIES[1]),
                &cell(MODALITIES[2]),
                &other,
                &in_prompts(architecture),
                &reasons(architecture, cells),
            ]);
        }
        text
    }
}

fn row(cells: &[&str]) -> String {
    format!("| {} |\n", cells.join(" | "))
}

fn cells(
    facts: &Facts,
    native: &BTreeSet<Native>,
    architecture: &Architecture,
) -> BTreeMap<&'static str, Cell> {
    let is_native = native.iter().any(|native| native.architecture == architecture.name);
    let cell = |modality: &str, limit| {
        let is_known = MODALITIES.contains(&modality);
        let maker = if architecture.unknown.is_some() {
            Maker::Unknown
        } else if architecture.refused.is_some() || !is_known {
            Maker::Refused
        } else if is_native && modality == "image" {
            Maker::Native
        } else if is_compared(facts, &architecture.name, modality) {
            Maker::Compared
        } else {
            Maker::Processor
        };
        Cell { maker, name: (!is_known).then(|| modality.to_owned()), limit }
    };
    if architecture.modalities.is_empty() {
        let by_files = Limit { most: None, certain: false };
        return MODALITIES
            .into_iter()
            .map(|modality| (modality, cell(modality, by_files)))
            .collect();
    }
    let column =
        |name: &str| MODALITIES.into_iter().find(|modality| *modality == name).unwrap_or(OTHER);
    architecture.modalities.iter().map(|(name, &limit)| (column(name), cell(name, limit))).collect()
}

/// Returns the text of a cell.
fn words(cell: &Cell) -> String {
    let mut words: Vec<String> = cell.name.iter().map(|name| format!("`{name}`")).collect();
    words.push(cell.maker.name().to_owned());
    // Native families have no limits of their own. The limits of refused and unknown architectures
    // are irrelevant.
    if matches!(cell.maker, Maker::Compared | Maker::Processor) {
        words.extend(cell.limit.most.map(|most| format!("at most {most}")));
        words.extend((!cell.limit.certain).then(|| "by its files".to_owned()));
    }
    words.join(", ")
}

/// Returns the text of the column on prompts.
fn in_prompts(architecture: &Architecture) -> String {
    let mut words = Vec::new();
    if architecture.inserts {
        words.push("inserted");
    }
    match &architecture.own_prompts {
        None => words.push("by its files"),
        Some(methods) if !methods.is_empty() => words.push("by vLLM's code"),
        Some(_) => {}
    }
    if architecture.written {
        words.push("conversations by vLLM's code");
    }
    words.join(", ")
}

/// Returns the text of the column on reasons.
fn reasons(architecture: &Architecture, cells: &BTreeMap<&'static str, Cell>) -> String {
    let refused = reason(architecture, cells).map(|reason| reason.name.to_owned());
    refused.into_iter().chain(architecture.unknown.clone()).collect::<Vec<_>>().join("; ")
}

/// The reason for a refusal. Reasons are sorted as in [`Refusal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Reason {
    /// The position in the list.
    position: usize,
    name: &'static str,
    means: &'static str,
}

fn reason(architecture: &Architecture, cells: &BTreeMap<&'static str, Cell>) -> Option<Reason> {
    let (name, means) = match architecture.refused {
        Some(Refusal::EncoderDecoder) => {
            ("encoder-decoder", "an encoder has a prompt of its own, which is not supported")
        }
        Some(Refusal::Pooling) => {
            ("pooling", "it produces embeddings, scores or classes instead of text")
        }
        Some(Refusal::Transcription) => (
            "transcription only",
            "vLLM supports it only in its transcription API, which Chiasm does not have",
        ),
        Some(Refusal::OwnTokenizer) => {
            ("tokenizer in Python", "its tokenizer is created by code, not read from its files")
        }
        Some(Refusal::MistralAudio) => (
            "recordings by Mistral's tokenizer",
            "rendering by the Python package `mistral_common` is supported for images only",
        ),
        None if cells.values().any(|cell| cell.maker == Maker::Refused) => (
            "modality of its own",
            "vLLM converts its images and videos to another modality, for which requests have no \
             content part yet",
        ),
        None => return None,
    };
    Some(Reason {
        position: architecture.refused.map_or(usize::MAX, |refusal| refusal as usize),
        name,
        means,
    })
}

#[cfg(test)]
mod tests {
    use super::super::facts::Registered;
    use super::*;

    fn architecture(name: &str, modalities: &[(&str, Option<u32>, bool)]) -> Architecture {
        let modalities = modalities
            .iter()
            .map(|&(name, most, certain)| (name.to_owned(), Limit { most, certain }))
            .collect();
        Architecture {
            name: name.to_owned(),
            modalities,
            own_prompts: Some(Vec::new()),
            inserts: false,
            written: false,
            refused: None,
            unknown: None,
        }
    }

    fn rows(architectures: Vec<Architecture>) -> Vec<String> {
        let facts = Facts {
            registered: Registered { vllm: "1.2.3".into(), architectures },
            compared: [
                ("paligemma".to_owned(), "P".to_owned()),
                ("qwen3vl".to_owned(), "N".to_owned()),
            ]
            .into(),
        };
        let native = [Native { model_type: "n".into(), architecture: "N".into() }].into();
        Table::new(&facts, &native).rows().lines().skip(2).map(str::to_owned).collect()
    }

    #[test]
    fn row_names_maker_per_modality() {
        let mut inserting = architecture("P", &[("image", Some(1), true)]);
        inserting.inserts = true;
        inserting.own_prompts = Some(vec!["apply".into()]);
        inserting.written = true;
        let found = rows(vec![
            architecture(
                "N",
                &[("image", None, true), ("video", None, true), ("audio", Some(2), false)],
            ),
            inserting,
        ]);
        assert_eq!(
            found[0],
            "| `N` | native | compared | vLLM's processor, at most 2, by its files |  |  |  |"
        );
        assert_eq!(
            found[1],
            "| `P` | compared, at most 1 | – | – |  | inserted, by vLLM's code, conversations by \
             vLLM's code |  |"
        );
    }

    #[test]
    fn refused_or_unknown_row_names_reason() {
        let mut pooling = architecture("E", &[("image", Some(1), true)]);
        pooling.refused = Some(Refusal::Pooling);
        let mut broken = architecture("U", &[]);
        broken.unknown = Some("no GPU".into());
        let mut by_files = architecture("F", &[]);
        by_files.own_prompts = None;
        let found = rows(vec![
            pooling,
            broken,
            by_files,
            architecture("K", &[("vision_chunk", None, true)]),
        ]);
        assert_eq!(found[0], "| `E` | refused | – | – |  |  | pooling |");
        assert_eq!(
            found[1],
            "| `U` | not known here | not known here | not known here |  |  | no GPU |"
        );
        let processor = "vLLM's processor, by its files";
        assert_eq!(
            found[2],
            format!("| `F` | {processor} | {processor} | {processor} |  | by its files |  |")
        );
        assert_eq!(
            found[3],
            "| `K` | – | – | – | `vision_chunk`, refused |  | modality of its own |"
        );
    }
}
