//! Checks the order of tiles and elements against an explicit index computation.

use super::{TileGrid, scalar};

#[test]
fn tile_elements_follow_the_documented_order() {
    let grid = TileGrid { columns: 3, rows: 2, width: 5, height: 4 };
    let pixels: Vec<u8> = (0..3 * 15 * 8).map(|index| (index * 31 % 251) as u8).collect();
    let mut out = vec![0; 6 * grid.tile_len()];
    let row = 3 * grid.tile_len();
    // A band can be a part of a row of tiles.
    for (lines, y) in [(0..3, 0), (3..4, 3), (4..8, 4)] {
        let out = if y < 4 { &mut out[..row] } else { &mut out[row..] };
        scalar::copy(&pixels[45 * lines.start..45 * lines.end], y, &grid, out);
    }
    let mut elements = out.into_iter();
    for tile in 0..6 {
        for channel in 0..3 {
            for pixel in 0..20 {
                let x = tile % 3 * 5 + pixel % 5;
                let y = tile / 3 * 4 + pixel / 5;
                assert_eq!(elements.next(), Some(pixels[3 * (15 * y + x) + channel]));
            }
        }
    }
    assert_eq!(elements.next(), None);
}

#[test]
fn tile_table_is_applied_per_channel() {
    let grid = TileGrid { columns: 2, rows: 1, width: 3, height: 2 };
    let pixels: Vec<u8> = (0..36).collect();
    let table = [0_u8, 1, 2].map(|channel| std::array::from_fn(|value| [channel, value as u8]));
    let mut raw = vec![0; 36];
    scalar::copy(&pixels, 0, &grid, &mut raw);
    let mut mapped = vec![0; 72];
    scalar::map(&pixels, 0, &grid, &table, &mut mapped);
    for (pair, value) in mapped.chunks_exact(2).zip(raw) {
        assert_eq!(pair, [value % 3, value]);
    }
}
