# The dashboard as a picture: the same queries, drawn by gnuplot.

import os
import re
import subprocess
import tempfile

import configuration

# Legible on white and on black: colours of medium lightness, and no background.
COLOURS = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#b8860b', '#56b4e9', '#8a6fd1', '#7f7f7f', '#c0392b', '#16a085']
GREY = '#808080'
COLUMNS = 3
UNITS = {'ops': 'a second', 's': 'seconds', 'percentunit': 'share', 'short': ''}


def name_of(legend, labels):
    return re.sub(r'{{(\w+)}}', lambda match: labels.get(match[1], ''), legend).strip()


def draw(ask, path):
    """Ask each query, and write the picture."""
    panels = list(configuration.panels())
    rows = -(-len(panels) // COLUMNS)
    with tempfile.TemporaryDirectory() as directory:
        script = [
            'set terminal svg size 1200,%d dynamic enhanced font "sans-serif,11"' % (rows * 230),
            'set output "%s"' % os.path.abspath(path),
            'set multiplot layout %d,%d' % (rows, COLUMNS),
            'set border 3 lc rgb "%s"' % GREY, 'set tics nomirror textcolor rgb "%s"' % GREY,
            'set grid ytics lc rgb "%s" lw 0.3' % GREY, 'set key outside bottom center horizontal textcolor rgb "%s" noenhanced' % GREY,
            'set xlabel "seconds" textcolor rgb "%s" offset 0,0.6' % GREY, 'set yrange [0:*]', 'set offsets 0,0,0.1,0']
        number = 0
        for title, unit, queries in panels:
            curves = []
            for expression, legend in queries:
                for series in ask(expression):
                    points = [(when, value) for when, value in series['values'] if value not in ('NaN', '+Inf', '-Inf')]
                    if not points:
                        continue
                    number += 1
                    moves = any(float(value) for _, value in points)
                    file = os.path.join(directory, str(number))
                    with open(file, 'w') as data:
                        first = float(points[0][0])
                        data.writelines('%.3f %s\n' % (when - first, value) for when, value in points)
                    curves.append((moves, name_of(legend, series['metric']), file))
            # What is zero all the time only fills the legend, unless all is.
            curves = [curve for curve in curves if curve[0]] or curves[:1]
            script += ['set title "%s" textcolor rgb "%s" noenhanced' % (title.replace('"', ''), GREY),
                       'set ylabel "%s" textcolor rgb "%s"' % (UNITS[unit], GREY)]
            if curves:
                script.append('plot ' + ', '.join('"%s" with lines lw 2 lc rgb "%s" title "%s"' % (
                    file, COLOURS[i % len(COLOURS)], name.replace('"', '')) for i, (_, name, file) in enumerate(curves)))
            else:
                script.append('plot NaN notitle')
        script.append('unset multiplot')
        subprocess.run(['gnuplot'], input='\n'.join(script), text=True, check=True, stderr=subprocess.PIPE)
    # No trace of where and when it was made.
    with open(path, encoding='utf-8') as file:
        text = file.read()
    text = re.sub(r'<desc>.*?</desc>\n?', '', text, flags=re.S)
    with open(path, 'w', encoding='utf-8') as file:
        file.write(text)
