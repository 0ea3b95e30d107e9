//! The GPUs of each launched engine.

use crate::error::CliError;

/// CUDA's variable with the GPUs that a process may use.
pub(super) const VISIBLE_GPUS: &str = "CUDA_VISIBLE_DEVICES";

/// Returns the GPUs of the engine with this index, as entries of [`VISIBLE_GPUS`]: `count` of the
/// GPUs (numbers or UUIDs) that `visible` lists, after those of the engines before it. Engines that
/// share GPUs all use the first ones.
///
/// Returns `None` if vLLM chooses among the GPUs of this process. Without a count, engines that
/// share a GPU use the first one.
///
/// # Errors
/// [`CliError::Usage`] if `visible` lists too few GPUs.
pub(super) fn select_gpus(
    index: u32,
    count: Option<u32>,
    are_shared: bool,
    visible: Option<&str>,
) -> Result<Option<Vec<String>>, CliError> {
    let count = match count {
        Some(count) => count as usize,
        None if are_shared && visible.is_none() => 1,
        // vLLM takes the first GPU of the list.
        None => return Ok(None),
    };
    let skipped = if are_shared { 0 } else { index as usize * count };
    let needed = skipped + count;
    let Some(visible) = visible else {
        return Ok(Some((skipped..needed).map(|gpu| gpu.to_string()).collect()));
    };
    let what = format!("with --gpus-per-engine {count} these engines need");
    check_gpu_count(needed as u32, &what, Some(visible))?;
    let selected = listed(visible).skip(skipped).take(count).map(str::to_owned);
    Ok(Some(selected.collect()))
}

/// Checks that `visible` lists at least `needed` GPUs. `what` begins the error.
///
/// # Errors
/// [`CliError::Usage`] if it lists too few.
pub(super) fn check_gpu_count(
    needed: u32,
    what: &str,
    visible: Option<&str>,
) -> Result<(), CliError> {
    let Some(visible) = visible else { return Ok(()) };
    let count = listed(visible).count();
    if count >= needed as usize {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "{what} {needed} GPUs or more, but {VISIBLE_GPUS} lists {count}: {visible:?}"
    )))
}

/// Returns the entries of [`VISIBLE_GPUS`].
fn listed(visible: &str) -> impl Iterator<Item = &str> {
    visible.split(',').map(str::trim).filter(|gpu| !gpu.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(index: u32, count: Option<u32>, visible: Option<&str>) -> Option<String> {
        select_gpus(index, count, false, visible).unwrap().map(|gpus| gpus.join(","))
    }

    #[test]
    fn engines_divide_visible_gpus() {
        assert_eq!(selected(0, None, Some("4,5")), None);
        assert_eq!(selected(1, Some(2), None).as_deref(), Some("2,3"));
        assert_eq!(selected(0, Some(2), Some("4, 5,6,7")).as_deref(), Some("4,5"));
        assert_eq!(selected(1, Some(2), Some("4,5,6,7")).as_deref(), Some("6,7"));
        assert_eq!(selected(1, Some(1), Some("GPU-a,GPU-b")).as_deref(), Some("GPU-b"));
    }

    #[test]
    fn too_few_visible_gpus_are_refused() {
        for visible in ["4", "", "4,5,6"] {
            let error = select_gpus(1, Some(2), false, Some(visible)).unwrap_err().to_string();
            assert!(error.contains("need 4 GPUs") && error.contains(VISIBLE_GPUS), "{error}");
        }
    }

    #[test]
    fn sharing_engines_use_first_gpus() {
        let shared = |count, visible| select_gpus(3, count, true, visible).unwrap();
        assert_eq!(shared(None, None), Some(vec!["0".to_owned()]));
        assert_eq!(shared(None, Some("4,5")), None);
        assert_eq!(shared(Some(2), Some("4,5,6")), Some(vec!["4".to_owned(), "5".to_owned()]));
    }
}
