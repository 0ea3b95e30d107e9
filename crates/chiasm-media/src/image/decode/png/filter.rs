//! Undoes the five row filters of PNG.
//!
//! Each pixel depends on the one before it, so that only the bytes of one pixel can be processed at
//! once. Their number is a constant parameter, which lets the compiler vectorise them.

use super::corrupt;
use crate::MediaError;

/// Undoes a row's filter. `step` is the distance in bytes to the pixel at the left: 1, 2, 3, 4, 6
/// or 8.
pub(super) fn unfilter(
    filter: u8,
    step: usize,
    row: &mut [u8],
    above: &[u8],
) -> Result<(), MediaError> {
    let undo = match step {
        1 => undo::<1>,
        2 => undo::<2>,
        3 => undo::<3>,
        4 => undo::<4>,
        6 => undo::<6>,
        _ => undo::<8>,
    };
    undo(filter, row, above)
}

fn undo<const STEP: usize>(filter: u8, row: &mut [u8], above: &[u8]) -> Result<(), MediaError> {
    match filter {
        0 => {}
        1 => add_prediction::<STEP>(row, above, |left, _, _| left),
        2 => {
            for (value, above) in row.iter_mut().zip(above) {
                *value = value.wrapping_add(*above);
            }
        }
        3 => add_prediction::<STEP>(row, above, |left, above, _| {
            ((u16::from(left) + u16::from(above)) / 2) as u8
        }),
        4 => add_prediction::<STEP>(row, above, paeth),
        _ => return Err(corrupt("an unknown row filter")),
    }
    Ok(())
}

/// Adds a prediction to every byte, from the bytes to the left, above, and above to the left. Bytes
/// outside the image are 0.
#[inline(always)]
fn add_prediction<const STEP: usize>(
    row: &mut [u8],
    above: &[u8],
    predict: impl Fn(u8, u8, u8) -> u8,
) {
    let mut left = [0; STEP];
    let mut corner = [0; STEP];
    for (pixel, above) in row.as_chunks_mut::<STEP>().0.iter_mut().zip(above.as_chunks::<STEP>().0)
    {
        for index in 0..STEP {
            left[index] =
                pixel[index].wrapping_add(predict(left[index], above[index], corner[index]));
        }
        *pixel = left;
        corner = *above;
    }
}

/// Returns the neighbour nearest to `left + above - corner`. Ties go to the first of left, above
/// and corner.
///
/// Branchless: a corner between the two others is the nearest, unless it equals one of them. A
/// corner outside their range makes the far end of the range the nearest.
#[inline(always)]
fn paeth(left: u8, above: u8, corner: u8) -> u8 {
    let a = i16::from(left);
    let b = i16::from(above);
    let c = i16::from(corner);
    let low = a.min(b);
    let high = a.max(b);
    let threshold = 3 * c - (a + b);
    let nearest = if high <= threshold { low } else { c };
    (if threshold <= low { high } else { nearest }) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Predicts as written in the PNG specification.
    fn specified(left: u8, above: u8, corner: u8) -> u8 {
        let [a, b, c] = [left, above, corner].map(i16::from);
        let p = a + b - c;
        let from_a = (p - a).abs();
        let from_b = (p - b).abs();
        let from_c = (p - c).abs();
        if from_a <= from_b && from_a <= from_c {
            left
        } else if from_b <= from_c {
            above
        } else {
            corner
        }
    }

    #[test]
    fn paeth_equals_the_specification() {
        for left in 0..=255 {
            for above in 0..=255 {
                for corner in 0..=255 {
                    assert_eq!(
                        paeth(left, above, corner),
                        specified(left, above, corner),
                        "{left} {above} {corner}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_filter_is_undone_at_every_step() {
        let values: Vec<u8> =
            (0..2 * 48u32).map(|index| (index.wrapping_mul(0x9E37_79B9) >> 24) as u8).collect();
        let (above, row) = values.split_at(48);
        for step in [1, 2, 3, 4, 6, 8] {
            for filter in 0..=4 {
                let left_of =
                    |line: &[u8], index: usize| if index < step { 0 } else { line[index - step] };
                let mut filtered: Vec<u8> = (0..row.len())
                    .map(|index| {
                        let left = left_of(row, index);
                        let corner = left_of(above, index);
                        let mean = (u16::from(left) + u16::from(above[index])) / 2;
                        let predicted = [
                            0,
                            left,
                            above[index],
                            mean as u8,
                            specified(left, above[index], corner),
                        ][filter];
                        row[index].wrapping_sub(predicted)
                    })
                    .collect();
                unfilter(filter as u8, step, &mut filtered, above).unwrap();
                assert_eq!(filtered, row, "filter {filter}, step {step}");
            }
            assert!(unfilter(5, step, &mut [0; 48], above).is_err());
        }
    }
}
