use std::collections::HashSet;

use chiasm_kv::BlockKey;
use chiasm_types::BlockSize;

use super::*;

const SIZE: BlockSize = BlockSize::new(16).unwrap();

fn requests(workload: Workload, seed: u64) -> Vec<Sequence> {
    let generator = Generator::new(workload, &WorkloadSize::default(), 4, seed);
    generator.take(2000).map(|request| request.sequence).collect()
}

/// Returns the fraction of the prompts' full blocks that an earlier sequence had, with an unlimited
/// cache.
fn reuse(sequences: &[Sequence]) -> f64 {
    let mut known: HashSet<BlockKey> = HashSet::new();
    let mut found = 0;
    let mut all = 0;
    for sequence in sequences {
        let keys = sequence.keys(SIZE);
        let prompt = &keys[..(sequence.prompt() - 1) / SIZE.get()];
        found += prompt.iter().take_while(|key| known.contains(key)).count();
        all += prompt.len();
        known.extend(keys);
    }
    found as f64 / all as f64
}

#[test]
fn workload_names_parse_to_their_workloads() {
    for workload in Workload::ALL {
        assert_eq!(workload.to_string().parse::<Workload>().unwrap(), workload);
    }
    let error = "shared".parse::<Workload>().unwrap_err().to_string();
    assert!(error.contains("'shared'") && error.contains("image-after-text"));
}

#[test]
fn requests_are_determined_by_the_seed() {
    for workload in Workload::ALL {
        assert_eq!(requests(workload, 1), requests(workload, 1));
        assert_ne!(requests(workload, 1)[0], requests(workload, 2)[0]);
    }
}

#[test]
fn shared_blocks_match_the_workload_names() {
    let shared = |workload| reuse(&requests(workload, 7));
    assert!(shared(Workload::SharedImageQa) > 0.8);
    assert!(shared(Workload::MultiTurnImages) > 0.5);
    assert!(shared(Workload::SharedSystemPrompt) > 0.7);
    // These share only the one full block of the template.
    assert!(shared(Workload::ImageAfterText) < 0.02);
    assert!(shared(Workload::UniqueImages) < 0.02);
}

#[test]
fn images_after_text_come_from_the_catalogue() {
    let all = requests(Workload::ImageAfterText, 7);
    let images: HashSet<u64> =
        all.iter().flat_map(|sequence| sequence.items()).map(|item| item.image.id).collect();
    assert!(images.len() <= 128, "{} images", images.len());
    let unique = requests(Workload::UniqueImages, 7);
    let images: HashSet<u64> =
        unique.iter().flat_map(|sequence| sequence.items()).map(|item| item.image.id).collect();
    assert_eq!(images.len(), 2000);
}

#[test]
fn mean_lengths_match_the_documentation() {
    let all = requests(Workload::UniqueImages, 3);
    let embeds =
        all.iter().map(|sequence| u64::from(sequence.items()[0].image.embeds)).sum::<u64>() / 2000;
    assert!((1120..1190).contains(&embeds), "{embeds} embeddings on average");
    let answers = all.iter().map(Sequence::answer).sum::<usize>() / 2000;
    assert!((135..165).contains(&answers), "{answers} tokens per answer");
}
